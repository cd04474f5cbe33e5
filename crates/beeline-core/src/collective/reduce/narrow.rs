//! Floating-point numbers of 8 and 16 bits.

/// A sign, `E` bits of exponent and `M` of fraction. With `INF` the largest exponent means infinity and
/// NaN, as in IEEE 754; without, only the largest code is NaN (OCP e4m3). With `SAT` what is too large
/// becomes the largest finite number, as CUDA's conversions to 8 bits do.
#[derive(Clone, Copy, Debug)]
pub struct Narrow<const E: u32, const M: u32, const INF: bool, const SAT: bool>;

impl<const E: u32, const M: u32, const INF: bool, const SAT: bool> Narrow<E, M, INF, SAT> {
    const BIAS: u32 = (1 << (E - 1)) - 1;
    const SIGN: u32 = 1 << (E + M);
    const EXPONENTS: u32 = (1 << E) - 1;
    /// Code of infinity; of what would be it.
    const INFINITY: u32 = Self::EXPONENTS << M;
    /// The largest finite code.
    const MAX: u32 = if INF { Self::INFINITY - 1 } else { Self::SIGN - 2 };
    const NAN: u32 = if INF { Self::INFINITY | 1 << (M - 1) } else { Self::SIGN - 1 };

    /// The number with this code, exactly.
    pub fn decode(code: u16) -> f32 {
        let code = u32::from(code);
        let sign = (code & Self::SIGN) << (31 - E - M);
        let magnitude = code & (Self::SIGN - 1);
        let (exponent, fraction) = (magnitude >> M, magnitude & ((1 << M) - 1));
        if exponent == 0 && E < 8 {
            let unit = f32::from_bits((128 - Self::BIAS - M) << 23);
            return f32::from_bits((fraction as f32 * unit).to_bits() | sign);
        }
        let special = if INF { exponent == Self::EXPONENTS } else { magnitude == Self::NAN };
        if special {
            let fraction = if INF { fraction } else { 1 << (M - 1) };
            return f32::from_bits(sign | 0x7f80_0000 | fraction << (23 - M));
        }
        f32::from_bits(sign | (exponent + 127 - Self::BIAS) << 23 | fraction << (23 - M))
    }

    /// The nearest code, ties to even.
    pub fn encode(value: f32) -> u16 {
        let bits = value.to_bits();
        let sign = bits >> 31 << (E + M);
        let magnitude = bits & 0x7fff_ffff;
        let code = if magnitude > 0x7f80_0000 {
            Self::NAN
        } else if magnitude == 0x7f80_0000 {
            if SAT { Self::MAX } else { Self::INFINITY }
        } else {
            let code = Self::round(magnitude);
            match (code > Self::MAX, SAT) {
                (true, true) => Self::MAX,
                (true, false) => Self::INFINITY,
                (false, _) => code,
            }
        };
        (sign | code) as u16
    }

    /// The code of a finite magnitude, as if exponents went on for ever.
    fn round(magnitude: u32) -> u32 {
        let exponent = (magnitude >> 23) + Self::BIAS;
        if exponent > 127 || E == 8 {
            // Normal here: what is cut off the fraction is rounded, and may carry into the exponent.
            let rebased = if E == 8 { magnitude } else { magnitude - ((127 - Self::BIAS) << 23) };
            return shift_to_even(rebased, 23 - M);
        }
        let fraction = magnitude & 0x7f_ffff | 0x80_0000;
        shift_to_even(fraction, 23 - M + (128 - exponent))
    }
}

/// `value >> by`, rounded to nearest, ties to even.
const fn shift_to_even(value: u32, by: u32) -> u32 {
    if by > 25 {
        return 0;
    }
    let odd = value >> by & 1;
    (value + ((1 << (by - 1)) - 1) + odd) >> by
}

#[cfg(test)]
mod tests {
    use super::*;

    type F16 = Narrow<5, 10, true, false>;
    type Bf16 = Narrow<8, 7, true, false>;
    type E4m3 = Narrow<4, 3, false, true>;
    type E5m2 = Narrow<5, 2, true, true>;

    fn round_trip(codes: u32, decode: fn(u16) -> f32, encode: fn(f32) -> u16) {
        let mut last = f32::NEG_INFINITY;
        for code in 0..codes as u16 / 2 {
            let value = decode(code);
            if value.is_nan() {
                assert!(decode(encode(value)).is_nan());
                continue;
            }
            assert!(value > last, "{code:#x}: in order");
            if value.is_finite() {
                assert_eq!(encode(value), code);
                let negative = code | (codes / 2) as u16;
                assert_eq!(decode(negative).to_bits(), (-value).to_bits());
                assert_eq!(encode(-value), negative);
                // Half way to the one below goes to the even code of the two.
                if code > 0 && last.is_finite() {
                    let half = f64::from(last) / 2.0 + f64::from(value) / 2.0;
                    let even = if code % 2 == 0 { code } else { code - 1 };
                    assert_eq!(encode(half as f32), even, "{half}");
                }
            }
            last = value;
        }
    }

    #[test]
    fn every_code_comes_back_and_ties_go_to_even() {
        round_trip(1 << 16, F16::decode, F16::encode);
        round_trip(1 << 16, Bf16::decode, Bf16::encode);
        round_trip(1 << 8, E4m3::decode, E4m3::encode);
        round_trip(1 << 8, E5m2::decode, E5m2::encode);
    }

    #[test]
    fn the_ends_are_those_of_the_formats() {
        assert_eq!(F16::decode(0x7bff), 65504.0);
        assert_eq!(F16::encode(65520.0), 0x7c00, "rounds up to infinity");
        assert_eq!(F16::encode(65519.9), 0x7bff);
        assert_eq!(F16::decode(1), 5.960_464_5e-8);
        assert_eq!(E4m3::decode(0x7e), 448.0);
        assert_eq!(E4m3::encode(1e9), 0x7e, "saturates");
        assert_eq!(E4m3::encode(f32::NEG_INFINITY), 0xfe);
        assert!(E4m3::decode(0x7f).is_nan());
        assert_eq!(E5m2::decode(0x7b), 57344.0);
        assert_eq!(E5m2::encode(1e9), 0x7b, "saturates");
        assert_eq!(E5m2::decode(0x7c), f32::INFINITY);
        assert_eq!(Bf16::encode(f32::MAX), 0x7f80);
        assert_eq!(E4m3::encode(0.0009), 0, "below half of the smallest");
        assert_eq!(E4m3::encode(0.001), 1);
    }
}
