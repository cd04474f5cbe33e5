//! The arithmetic of reductions on bytes: one pass over all inputs, in rank order.
//!
//! Every result is made of all inputs at once, so that nothing is rounded in between: 16-bit and 8-bit
//! floats are accumulated in 32 bits. What [`super::types`] says about each operation holds here; the
//! kernels of CUDA devices follow the same rules.

use super::types::{DataType, Illegal, RedOp};

mod narrow;

pub use narrow::Narrow;

/// One element in the low bytes, little endian: the factor of a pre-multiplied sum.
pub type Scalar = [u8; 8];

/// A reduction that is defined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reduction {
    dtype: DataType,
    op: RedOp,
    ranks: u32,
}

impl Reduction {
    /// `op` over elements `dtype` of `ranks` inputs.
    ///
    /// # Errors
    /// As [`RedOp::check`].
    pub fn new(dtype: DataType, op: RedOp, ranks: u32) -> Result<Self, Illegal> {
        op.check(dtype, None)?;
        Ok(Self { dtype, op, ranks: ranks.max(1) })
    }

    /// Reduces `inputs`, in their order, into `out`. Whole elements that every input and `out` have are
    /// reduced; what lies beyond stays. `factors` has one element a rank for a pre-multiplied sum (a
    /// missing one counts as 0) and is not looked at otherwise.
    pub fn run(&self, inputs: &[&[u8]], factors: &[Scalar], out: &mut [u8]) {
        let job = Job { op: self.op, ranks: self.ranks, inputs, factors };
        match self.dtype {
            DataType::I8 => job.integers::<i8, 1>(out),
            DataType::U8 => job.integers::<u8, 1>(out),
            DataType::I32 => job.integers::<i32, 4>(out),
            DataType::U32 => job.integers::<u32, 4>(out),
            DataType::I64 => job.integers::<i64, 8>(out),
            DataType::U64 => job.integers::<u64, 8>(out),
            DataType::F32 => job.floats::<f32, f32, 4>(out),
            DataType::F64 => job.floats::<f64, f64, 8>(out),
            DataType::F16 => job.floats::<Narrow<5, 10, true, false>, f32, 2>(out),
            DataType::BF16 => job.floats::<Narrow<8, 7, true, false>, f32, 2>(out),
            DataType::E4M3 => job.floats::<Narrow<4, 3, false, true>, f32, 1>(out),
            DataType::E5M2 => job.floats::<Narrow<5, 2, true, true>, f32, 1>(out),
            _ => job.bools(out),
        }
    }
}

struct Job<'a> {
    op: RedOp,
    ranks: u32,
    inputs: &'a [&'a [u8]],
    factors: &'a [Scalar],
}

impl Job<'_> {
    /// Calls `element` with all inputs of each element.
    fn each<const N: usize>(
        &self,
        out: &mut [u8],
        mut element: impl FnMut(&Self, usize) -> [u8; N],
    ) {
        let shortest = self.inputs.iter().map(|input| input.len() / N).min().unwrap_or(0);
        let (whole, _) = out.as_chunks_mut::<N>();
        for (index, place) in whole.iter_mut().take(shortest).enumerate() {
            *place = element(self, index);
        }
    }

    /// Element `index` of every input, in rank order.
    fn column<const N: usize>(&self, index: usize) -> impl Iterator<Item = [u8; N]> {
        self.inputs.iter().filter_map(move |input| input.as_chunks::<N>().0.get(index).copied())
    }

    fn factor<const N: usize>(&self, rank: usize) -> [u8; N] {
        let factor = self.factors.get(rank).and_then(|scalar| scalar.first_chunk::<N>());
        factor.copied().unwrap_or([0; N])
    }

    fn integers<T: Integer<N>, const N: usize>(&self, out: &mut [u8]) {
        self.each(out, |job, index| {
            let column = job.column::<N>(index).map(T::load);
            let value = match job.op {
                RedOp::PROD => column.reduce(T::mul),
                RedOp::MAX => column.reduce(|a, b| if b > a { b } else { a }),
                RedOp::MIN => column.reduce(|a, b| if b < a { b } else { a }),
                RedOp::PRE_MUL_SUM => {
                    let scaled = |(rank, value): (usize, T)| value.mul(T::load(job.factor(rank)));
                    column.enumerate().map(scaled).reduce(T::add)
                }
                RedOp::AVG => column.reduce(T::add).map(|sum| sum.divide(job.ranks)),
                _ => column.reduce(T::add),
            };
            value.map_or([0; N], T::store)
        });
    }

    fn floats<T: Float<A, N>, A: Wide, const N: usize>(&self, out: &mut [u8]) {
        self.each(out, |job, index| {
            let column = job.column::<N>(index).map(T::widen);
            let value = match job.op {
                RedOp::PROD => column.reduce(A::mul),
                RedOp::MAX => column.reduce(|a, b| if a.is_nan() || a.below(b) { b } else { a }),
                RedOp::MIN => column.reduce(|a, b| if a.is_nan() || b.below(a) { b } else { a }),
                RedOp::PRE_MUL_SUM => {
                    let scaled = |(rank, value): (usize, A)| value.mul(T::widen(job.factor(rank)));
                    column.enumerate().map(scaled).reduce(A::add)
                }
                RedOp::AVG => column.reduce(A::add).map(|sum| sum.divide(job.ranks)),
                _ => column.reduce(A::add),
            };
            value.map_or([0; N], T::narrow)
        });
    }

    fn bools(&self, out: &mut [u8]) {
        self.each(out, |job, index| {
            let mut column = job.column::<1>(index).map(|[byte]| byte != 0);
            let all = matches!(job.op, RedOp::PROD | RedOp::MIN);
            [u8::from(if all { column.all(|value| value) } else { column.any(|value| value) })]
        });
    }
}

trait Integer<const N: usize>: Copy + PartialOrd {
    fn load(bytes: [u8; N]) -> Self;
    fn store(self) -> [u8; N];
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn divide(self, ranks: u32) -> Self;
}

macro_rules! integers {
    ($($type:ty, $bytes:literal;)*) => {$(
        impl Integer<$bytes> for $type {
            fn load(bytes: [u8; $bytes]) -> Self {
                Self::from_le_bytes(bytes)
            }
            fn store(self) -> [u8; $bytes] {
                self.to_le_bytes()
            }
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn divide(self, ranks: u32) -> Self {
                // The quotient is never larger than the dividend, so it fits again.
                (i128::from(self) / i128::from(ranks)) as Self
            }
        }
    )*};
}

integers! { i8, 1; u8, 1; i32, 4; u32, 4; i64, 8; u64, 8; }

/// A type that sums are accumulated in.
trait Wide: Copy {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn divide(self, ranks: u32) -> Self;
    fn is_nan(self) -> bool;
    /// Less than, with -0 below +0.
    fn below(self, other: Self) -> bool;
}

macro_rules! wide {
    ($($type:ident)*) => {$(
        impl Wide for $type {
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn mul(self, other: Self) -> Self {
                self * other
            }
            #[allow(clippy::cast_lossless, reason = "it is one of the two types only")]
            fn divide(self, ranks: u32) -> Self {
                self / ranks as Self
            }
            fn is_nan(self) -> bool {
                $type::is_nan(self)
            }
            fn below(self, other: Self) -> bool {
                let zeros = self == other && self.is_sign_negative() && !other.is_sign_negative();
                self < other || zeros
            }
        }
    )*};
}

wide! { f32 f64 }

/// A floating-point element with the type it is accumulated in.
trait Float<A, const N: usize> {
    fn widen(bytes: [u8; N]) -> A;
    fn narrow(value: A) -> [u8; N];
}

impl Float<Self, 4> for f32 {
    fn widen(bytes: [u8; 4]) -> Self {
        Self::from_le_bytes(bytes)
    }
    fn narrow(value: Self) -> [u8; 4] {
        value.to_le_bytes()
    }
}

impl Float<Self, 8> for f64 {
    fn widen(bytes: [u8; 8]) -> Self {
        Self::from_le_bytes(bytes)
    }
    fn narrow(value: Self) -> [u8; 8] {
        value.to_le_bytes()
    }
}

impl<const E: u32, const M: u32, const INF: bool, const SAT: bool> Float<f32, 2>
    for Narrow<E, M, INF, SAT>
{
    fn widen(bytes: [u8; 2]) -> f32 {
        Self::decode(u16::from_le_bytes(bytes))
    }
    fn narrow(value: f32) -> [u8; 2] {
        Self::encode(value).to_le_bytes()
    }
}

impl<const E: u32, const M: u32, const INF: bool, const SAT: bool> Float<f32, 1>
    for Narrow<E, M, INF, SAT>
{
    fn widen([byte]: [u8; 1]) -> f32 {
        Self::decode(byte.into())
    }
    fn narrow(value: f32) -> [u8; 1] {
        [Self::encode(value) as u8]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    fn run(dtype: DataType, op: RedOp, inputs: &[&[u8]], factors: &[Scalar]) -> Vec<u8> {
        let mut out = inputs[0].to_vec();
        let reduction = Reduction::new(dtype, op, inputs.len() as u32).unwrap();
        reduction.run(inputs, factors, &mut out);
        out
    }

    fn f32s(dtype: DataType, op: RedOp, inputs: &[f32]) -> f32 {
        let inputs: Vec<[u8; 4]> = inputs.iter().map(|x| x.to_le_bytes()).collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(|x| &x[..]).collect();
        f32::from_le_bytes(run(dtype, op, &inputs, &[]).try_into().unwrap())
    }

    #[test]
    fn integers_wrap_and_averages_go_towards_zero() {
        assert_eq!(run(DataType::I8, RedOp::SUM, &[&[120], &[100]], &[]), [(-36_i8) as u8]);
        assert_eq!(run(DataType::U8, RedOp::PROD, &[&[16], &[17]], &[]), [16]);
        let average = |a: i8, b: i8| run(DataType::I8, RedOp::AVG, &[&[a as u8], &[b as u8]], &[]);
        assert_eq!(average(-4, -3), [(-3_i8) as u8]);
        assert_eq!(average(4, 3), [3]);
        // -128 and 127 tell signed from unsigned order.
        for (dtype, max, min) in [(DataType::I8, 0x7f, 0x80), (DataType::U8, 0x80, 0x7f)] {
            assert_eq!(run(dtype, RedOp::MAX, &[&[0x80], &[0x7f]], &[]), [max]);
            assert_eq!(run(dtype, RedOp::MIN, &[&[0x80], &[0x7f]], &[]), [min]);
        }
        let factors = [[3, 0, 0, 0, 0, 0, 0, 0], [255, 255, 255, 255, 0, 0, 0, 0]];
        let (a, b) = (5_i32.to_le_bytes(), 7_i32.to_le_bytes());
        let sum = run(DataType::I32, RedOp::PRE_MUL_SUM, &[&a, &b], &factors);
        assert_eq!(sum, 8_i32.to_le_bytes(), "3 * 5 - 7");
    }

    #[test]
    fn floats_are_added_in_rank_order_and_nan_is_left_out_of_min_and_max() {
        let order = [1e8, 1.0, -1e8, 1.0];
        assert_eq!(f32s(DataType::F32, RedOp::SUM, &order), ((1e8_f32 + 1.0) - 1e8) + 1.0);
        assert_eq!(f32s(DataType::F32, RedOp::AVG, &[1.0, 2.0, 4.0]), 7.0 / 3.0);
        assert_eq!(f32s(DataType::F32, RedOp::MAX, &[f32::NAN, -1.0, -2.0]), -1.0);
        assert_eq!(f32s(DataType::F32, RedOp::MIN, &[-1.0, f32::NAN]), -1.0);
        assert!(f32s(DataType::F32, RedOp::MIN, &[f32::NAN, f32::NAN]).is_nan());
        for pair in [[0.0, -0.0], [-0.0, 0.0]] {
            assert!(f32s(DataType::F32, RedOp::MIN, &pair).is_sign_negative());
            assert!(f32s(DataType::F32, RedOp::MAX, &pair).is_sign_positive());
        }
    }

    /// Averages of 16-bit floats: the sum is exact in 32 bits, and what is rounded is the quotient.
    #[test]
    fn sixteen_bits_are_rounded_once() {
        type Bf16 = Narrow<8, 7, true, false>;
        for ranks in [3_u32, 6, 10] {
            for start in 0..500_u16 {
                let inputs: Vec<u16> = (0..ranks as u16).map(|r| 0x3f80 + start + r * 31).collect();
                let bytes: Vec<[u8; 2]> = inputs.iter().map(|x| x.to_le_bytes()).collect();
                let slices: Vec<&[u8]> = bytes.iter().map(|x| &x[..]).collect();
                let exact: f64 = inputs.iter().map(|x| f64::from(Bf16::decode(*x))).sum();
                let expected = Bf16::encode((exact as f32) / ranks as f32);
                let found = run(DataType::BF16, RedOp::AVG, &slices, &[]);
                assert_eq!(found, expected.to_le_bytes(), "{ranks} {start}");
            }
        }
    }

    #[test]
    fn bools_are_or_and_and() {
        for (op, expected) in [
            (RedOp::SUM, [0, 1, 1, 1]),
            (RedOp::MAX, [0, 1, 1, 1]),
            (RedOp::PROD, [0, 0, 0, 1]),
            (RedOp::MIN, [0, 0, 0, 1]),
        ] {
            let inputs: [&[u8]; 2] = [&[0, 0, 9, 8], &[0, 128, 0, 255]];
            assert_eq!(run(DataType::BOOL, op, &inputs, &[]), expected);
        }
        assert!(Reduction::new(DataType::BOOL, RedOp::AVG, 2).is_err());
    }

    #[test]
    fn a_tail_that_is_no_element_stays() {
        let mut out = [9; 7];
        let reduction = Reduction::new(DataType::I32, RedOp::SUM, 2).unwrap();
        reduction.run(&[&[1; 7], &[1; 6]], &[], &mut out);
        assert_eq!(out, [2, 2, 2, 2, 9, 9, 9]);
    }
}
