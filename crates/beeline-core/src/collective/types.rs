//! Element types and reductions, by the numbers of NCCL's interface (nccl.h 2.28).
//!
//! Semantics, the same on every device and for every size:
//!
//! - Ranks are added in the order of their numbers. 16-bit and 8-bit floats are accumulated in 32-bit
//!   and rounded once, at the end, to nearest even; 8-bit floats saturate at the largest finite value.
//! - Integers wrap (two's complement).
//! - `avg` divides the sum: floats by the number of ranks in the accumulator's type, integers towards
//!   zero. (NCCL's rings multiply every input by `1/n` in the element's type first, so the last bit of
//!   an average of 16-bit floats can differ for `n` that is no power of two.)
//! - `min` and `max` of floats leave NaN out unless every input is NaN, as `fminf` does.
//! - `bool` is a byte: `sum` and `max` are "or", `prod` and `min` are "and", `avg` is refused.

use core::fmt;

/// The type of an element. An open number: one that is not known has no size and every use is refused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataType(i32);

macro_rules! data_types {
    ($($name:ident = $number:literal, $text:literal, $bytes:literal, $title:literal;)*) => {
        impl DataType {
            $(#[doc = $title] pub const $name: Self = Self($number);)*

            /// Every type that is known.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Its name, for people; `None` where the number is not known.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 { $($number => Some($text),)* _ => None }
            }

            /// Bytes of an element; `None` where the number is not known.
            pub const fn size_bytes(self) -> Option<u64> {
                match self.0 { $($number => Some($bytes),)* _ => None }
            }
        }
    };
}

data_types! {
    I8 = 0, "i8", 1, "`ncclInt8` (also `ncclChar`).";
    U8 = 1, "u8", 1, "`ncclUint8`.";
    I32 = 2, "i32", 4, "`ncclInt32` (also `ncclInt`).";
    U32 = 3, "u32", 4, "`ncclUint32`.";
    I64 = 4, "i64", 8, "`ncclInt64`.";
    U64 = 5, "u64", 8, "`ncclUint64`.";
    F16 = 6, "f16", 2, "`ncclFloat16` (also `ncclHalf`).";
    F32 = 7, "f32", 4, "`ncclFloat32` (also `ncclFloat`).";
    F64 = 8, "f64", 8, "`ncclFloat64` (also `ncclDouble`).";
    BF16 = 9, "bf16", 2, "`ncclBfloat16`.";
    E4M3 = 10, "e4m3", 1, "`ncclFloat8e4m3`: finite, NaN is 0x7f and 0xff.";
    E5M2 = 11, "e5m2", 1, "`ncclFloat8e5m2`: IEEE, with infinities.";
    BOOL = 256, "bool", 1, "A byte that is 0 or not. Not of NCCL's interface: callers there send `u8`.";
}

impl DataType {
    /// The type with this number, known or not.
    pub const fn new(number: i32) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn number(self) -> i32 {
        self.0
    }

    /// Whether it is one of NCCL's interface.
    pub const fn is_nccl(self) -> bool {
        self.0 >= 0 && self.0 <= 11
    }

    /// Whether it is a floating-point type.
    pub const fn is_float(self) -> bool {
        self.0 >= 6 && self.0 <= 11
    }

    /// Whether it is one of the 8-bit floats.
    pub const fn is_fp8(self) -> bool {
        self.0 == 10 || self.0 == 11
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "type {}", self.0),
        }
    }
}

impl fmt::Debug for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How elements are combined. An open number, as [`DataType`]; torch counts otherwise (sum, avg, prod,
/// min, max), so a number is never passed on from there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RedOp(i32);

impl RedOp {
    /// `ncclSum`.
    pub const SUM: Self = Self(0);
    /// `ncclProd`.
    pub const PROD: Self = Self(1);
    /// `ncclMax`.
    pub const MAX: Self = Self(2);
    /// `ncclMin`.
    pub const MIN: Self = Self(3);
    /// `ncclAvg`.
    pub const AVG: Self = Self(4);
    /// A sum of inputs that each rank multiplies by a factor of its own first
    /// (`ncclRedOpCreatePreMulSum`). Handles of created operations are 5 and above in NCCL's interface;
    /// here they all have this number, and the factor travels with the call.
    pub const PRE_MUL_SUM: Self = Self(5);

    /// Every reduction.
    pub const ALL: &'static [Self] =
        &[Self::SUM, Self::PROD, Self::MAX, Self::MIN, Self::AVG, Self::PRE_MUL_SUM];

    /// The reduction with this number, known or not.
    pub const fn new(number: i32) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn number(self) -> i32 {
        self.0
    }

    /// Its name, for people; `None` where the number is not known.
    pub const fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            0 => "sum",
            1 => "prod",
            2 => "max",
            3 => "min",
            4 => "avg",
            5 => "pre-multiplied sum",
            _ => return None,
        })
    }

    /// Whether the reduction goes with the type, on a device of compute capability `sm` (times ten;
    /// `None` for a simulated one, which reduces everything).
    ///
    /// # Errors
    /// Which of the two is unknown, or why they do not go together.
    pub const fn check(self, dtype: DataType, sm: Option<u32>) -> Result<(), Illegal> {
        if dtype.size_bytes().is_none() {
            return Err(Illegal::UnknownType(dtype));
        }
        if self.name().is_none() {
            return Err(Illegal::UnknownOp(self));
        }
        if dtype.0 == DataType::BOOL.0 && (self.0 == Self::AVG.0 || self.0 == Self::PRE_MUL_SUM.0) {
            return Err(Illegal::BoolAverage(self));
        }
        match sm {
            Some(sm) if dtype.is_fp8() && sm < 90 => Err(Illegal::Fp8Needs90(dtype, sm)),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for RedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "operation {}", self.0),
        }
    }
}

impl fmt::Debug for RedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a reduction and a type do not go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Illegal {
    /// No type has this number.
    UnknownType(DataType),
    /// No reduction has this number.
    UnknownOp(RedOp),
    /// A bool has no average and no factor.
    BoolAverage(RedOp),
    /// 8-bit floats are reduced from compute capability 9.0 on.
    Fp8Needs90(DataType, u32),
}

impl fmt::Display for Illegal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownType(dtype) => write!(f, "there is no element {dtype}"),
            Self::UnknownOp(op) => write!(f, "there is no reduction {op}"),
            Self::BoolAverage(op) => write!(f, "{op} is not defined for bool; convert it first"),
            Self::Fp8Needs90(dtype, sm) => write!(
                f,
                "{dtype} is reduced from compute capability 9.0 on, and this device has {}.{}; \
                 convert it to f16 first",
                sm / 10,
                sm % 10
            ),
        }
    }
}

impl core::error::Error for Illegal {}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    /// NCCL's numbers, and torch's order of the reductions, which is another.
    #[test]
    fn numbers_are_those_of_nccl() {
        let types = ["i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "e4m3"];
        for (number, name) in types.iter().chain(&["e5m2"]).enumerate() {
            assert_eq!(DataType::new(number as i32).to_string(), *name);
        }
        let torch = ["sum", "avg", "prod", "min", "max"];
        let ours = [RedOp::SUM, RedOp::AVG, RedOp::PROD, RedOp::MIN, RedOp::MAX];
        for (name, op) in torch.iter().zip(ours) {
            assert_eq!(op.to_string(), *name);
        }
        assert_eq!(ours.map(RedOp::number), [0, 4, 1, 3, 2]);
        for number in [-1, 12, 255, 257, i32::MAX, i32::MIN] {
            assert_eq!(DataType::new(number).size_bytes(), None);
            assert!(RedOp::SUM.check(DataType::new(number), None).is_err());
        }
        assert_eq!(RedOp::new(9).check(DataType::F32, None), Err(Illegal::UnknownOp(RedOp(9))));
    }

    #[test]
    fn what_goes_together() {
        for &dtype in DataType::ALL {
            for &op in RedOp::ALL {
                let bool_average = dtype == DataType::BOOL && matches!(op.number(), 4 | 5);
                assert_eq!(op.check(dtype, None).is_ok(), !bool_average, "{op} {dtype}");
                let old = op.check(dtype, Some(89));
                assert_eq!(old.is_ok(), !bool_average && !dtype.is_fp8(), "{op} {dtype}");
                assert_eq!(op.check(dtype, Some(90)).is_ok(), !bool_average, "{op} {dtype}");
            }
        }
    }
}
