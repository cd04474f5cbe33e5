//! The element types of a model file, known and yet to come.
//!
//! Source: the `Dtype` list of the safetensors reference implementation, version 0.8. The list has
//! grown with every generation of hardware, so [`Dtype`] is open: a name it does not know is kept
//! as [`Dtype::Other`], and such a tensor is moved by its byte length.

use alloc::boxed::Box;
use core::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal;)*) => {
        /// The type of a tensor's elements. Values are little-endian.
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[$doc])* $variant,)*
            /// A type this build does not know, by the name that stands in the file.
            Other(Box<str>),
        }

        impl Dtype {
            /// Every known type, in the order of this table.
            pub const KNOWN: &'static [Self] = &[$(Self::$variant,)*];

            /// The type of that name. Names are case-sensitive, and every name is legal.
            pub fn from_name(name: &str) -> Self {
                match name {
                    $($name => Self::$variant,)*
                    other => Self::Other(other.into()),
                }
            }

            /// The name as it stands in a file.
            pub fn name(&self) -> &str {
                match self {
                    $(Self::$variant => $name,)*
                    Self::Other(name) => name,
                }
            }

            /// Bits per element; `None` for a type this build does not know.
            pub const fn bits(&self) -> Option<u32> {
                match self {
                    $(Self::$variant => Some($bits),)*
                    Self::Other(_) => None,
                }
            }
        }
    };
}

dtypes! {
    /// A truth value, one byte each.
    Bool = "BOOL", 8;
    /// OCP Microscaling FP4 (E2M1), two elements a byte.
    F4 = "F4", 4;
    /// OCP Microscaling FP6, 2 exponent and 3 mantissa bits, packed without gaps.
    F6E2m3 = "F6_E2M3", 6;
    /// OCP Microscaling FP6, 3 exponent and 2 mantissa bits, packed without gaps.
    F6E3m2 = "F6_E3M2", 6;
    /// Unsigned, 8 bits.
    U8 = "U8", 8;
    /// Signed, 8 bits.
    I8 = "I8", 8;
    /// FP8, 5 exponent and 2 mantissa bits.
    F8E5m2 = "F8_E5M2", 8;
    /// FP8, 4 exponent and 3 mantissa bits.
    F8E4m3 = "F8_E4M3", 8;
    /// OCP Microscaling scale: 8 exponent bits.
    F8E8m0 = "F8_E8M0", 8;
    /// FP8 E4M3 without infinities and without a negative zero.
    F8E4m3Fnuz = "F8_E4M3FNUZ", 8;
    /// FP8 E5M2 without infinities and without a negative zero.
    F8E5m2Fnuz = "F8_E5M2FNUZ", 8;
    /// Signed, 16 bits.
    I16 = "I16", 16;
    /// Unsigned, 16 bits.
    U16 = "U16", 16;
    /// IEEE 754 half precision.
    F16 = "F16", 16;
    /// bfloat16: the upper half of a single.
    Bf16 = "BF16", 16;
    /// Signed, 32 bits.
    I32 = "I32", 32;
    /// Unsigned, 32 bits.
    U32 = "U32", 32;
    /// IEEE 754 single precision.
    F32 = "F32", 32;
    /// Complex of two singles.
    C64 = "C64", 64;
    /// IEEE 754 double precision.
    F64 = "F64", 64;
    /// Signed, 64 bits.
    I64 = "I64", 64;
    /// Unsigned, 64 bits.
    U64 = "U64", 64;
}

impl fmt::Display for Dtype {
    /// The name; control characters of a foreign name are escaped and a long one is cut.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(name) => super::Clipped(name).fmt(f),
            known => f.write_str(known.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;
    use alloc::string::ToString;

    #[test]
    fn names_and_widths_agree_with_the_reference() {
        for dtype in Dtype::KNOWN {
            let quoted = format!("\"{}\"", dtype.name());
            let reference: safetensors::Dtype = serde_json::from_str(&quoted).unwrap();
            assert_eq!(dtype.bits().map(|bits| bits as usize), Some(reference.bitsize()));
            assert_eq!(reference.to_string(), dtype.name());
            assert_eq!(&Dtype::from_name(dtype.name()), dtype);
        }
    }

    #[test]
    fn an_unknown_name_is_kept() {
        for name in ["F2", "f32", "", "F32 ", "INT4_AWQ"] {
            let dtype = Dtype::from_name(name);
            assert_eq!(dtype, Dtype::Other(name.into()));
            assert_eq!((dtype.name(), dtype.bits()), (name, None));
        }
        assert_eq!(Dtype::from_name("a\u{1b}[31m").to_string(), "a\\u{1b}[31m");
    }
}
