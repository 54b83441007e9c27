//! Floating-point numbers with a 64-bit mantissa. The fork computes scores in x87 extended precision; `f64` rounds some
//! ties to another score.

/// A non-negative number `mantissa × 2^exponent`. The top bit of the mantissa is set, or the number is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extended {
    mantissa: u64,
    exponent: i32,
}

impl Extended {
    /// `a × b`, rounded once. `b` must be finite; a negative `b` counts as 0.
    pub(super) fn product(a: u64, b: f64) -> Extended {
        if b <= 0.0 {
            return Extended::rounded(0, 0);
        }
        let bits = b.to_bits();
        let (exponent, fraction) = ((bits >> 52) as i32, bits & ((1 << 52) - 1));
        let (mantissa, exponent) = match exponent {
            0 => (fraction, -1074), // subnormal
            _ => (fraction | 1 << 52, exponent - 1075),
        };
        Extended::rounded(u128::from(a) * u128::from(mantissa), exponent)
    }

    /// `self + other`, rounded once.
    pub(super) fn plus(self, other: Extended) -> Extended {
        let (high, low) =
            if (self.mantissa == 0, -self.exponent) <= (other.mantissa == 0, -other.exponent) {
                (self, other)
            } else {
                (other, self)
            };
        // Keeps 63 bits below the last bit of `high`. Bits of `low` that are shifted out set the lowest bit (sticky bit).
        let low_bits = u128::from(low.mantissa) << 63;
        let shift = (i64::from(high.exponent) - i64::from(low.exponent)).clamp(0, 127) as u32;
        let lost = low_bits & ((1 << shift) - 1) != 0;
        let sum = (u128::from(high.mantissa) << 63) + ((low_bits >> shift) | u128::from(lost));
        Extended::rounded(sum, high.exponent - 63)
    }

    /// The score: rounds to the nearest integer, like the fork: adds 0.5 with rounding and truncates. At least 1 and at
    /// most `u64::MAX`; 0 stays 0.
    pub(super) fn to_score(self) -> u64 {
        if self.mantissa == 0 {
            return 0;
        }
        if self.exponent > 0 || (self.exponent == 0 && self.mantissa == u64::MAX) {
            return u64::MAX;
        }
        let Extended { mantissa, exponent } = self.plus(Extended::product(1, 0.5));
        let score = match exponent {
            0 => mantissa,
            1.. => u64::MAX,
            _ => mantissa.checked_shr(exponent.unsigned_abs()).unwrap_or(0),
        };
        score.max(1)
    }

    /// `value × 2^exponent`, rounded to 64 bits of mantissa, ties to even.
    #[expect(clippy::cast_possible_truncation, reason = "the high and the low half")]
    fn rounded(value: u128, exponent: i32) -> Extended {
        if value == 0 {
            return Extended {
                mantissa: 0,
                exponent: 0,
            };
        }
        let zeros = value.leading_zeros();
        let value = value << zeros;
        let exponent = exponent - zeros as i32 + 64;
        let (mantissa, rest) = ((value >> 64) as u64, value as u64);
        let half = 1 << 63;
        let up = rest > half || (rest == half && mantissa & 1 == 1);
        match mantissa.checked_add(u64::from(up)) {
            Some(mantissa) => Extended { mantissa, exponent },
            None => Extended {
                mantissa: 1 << 63,
                exponent: exponent + 1,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(hits: u64, weight: f64, hot: u64) -> u64 {
        let product = Extended::product(hits, weight);
        product.plus(Extended::product(hot, 0.05)).to_score()
    }

    #[test]
    fn rounds_half_up() {
        assert_eq!(score(3, 0.5, 0), 2); // 1.5
        assert_eq!(score(1, 0.25, 0), 1); // at least 1
        assert_eq!(score(0, 1.0, 0), 0);
        assert_eq!(score(7, 1.0, 0), 7);
    }

    /// The double nearest to 0.05 is above 1/20, so 30 + 10 × 0.05 is above 30.5. The double nearest to 0.35 is below 7/20,
    /// so 10 × 0.35 + 20 × 0.05 is 4.5 - 1.67e-16, which `f64` rounds to 4.5.
    #[test]
    fn rounds_ties_by_exact_value_of_doubles() {
        assert_eq!(score(30, 1.0, 10), 31);
        assert_eq!(10.0f64 * 0.35 + 20.0 * 0.05, 4.5);
        assert_eq!(score(10, 0.35, 20), 4);
    }

    #[test]
    fn saturates_and_rounds_large_counts() {
        assert_eq!(score(u64::MAX, 1.0, 0), u64::MAX);
        assert_eq!(score(u64::MAX, 1.6, 0), u64::MAX);
        assert_eq!(score(u64::MAX - 1, 1.0, 0), u64::MAX - 1);
        assert_eq!(score(u64::MAX - 1, 1.0, u64::MAX), u64::MAX);
        assert_eq!(score(1 << 63, 1.0, 0), 1 << 63);
        // 6456360425798342656.7 in exact arithmetic on the double nearest to 0.7.
        assert_eq!(score((1 << 63) + 1, 0.7, 0), 6_456_360_425_798_342_657);
    }

    /// Results of `long double` in a C compiler on x86-64 for `hits * w + hot * 0.05 + 0.5`, truncated. In the first four
    /// cases exact arithmetic yields another score; in the others `f64` does.
    #[test]
    fn matches_long_double() {
        let cases = [
            (
                3_444_311_187_891_318_396,
                1.6,
                3_444_302_807_828_142_128,
                5_683_113_041_017_516_856,
            ),
            (
                18_135_749_983_381_103_775,
                0.55,
                18_135_749_983_381_090_465,
                10_881_449_990_028_662_456,
            ),
            (
                5_338_394_663_231_392_612,
                1.6,
                240,
                8_541_431_461_170_228_666,
            ),
            (
                260_522_703_691_837_153,
                0.55,
                260_522_703_691_642_341,
                156_313_622_215_092_564,
            ),
            (
                144_035_876_440_143_754,
                0.55,
                144_035_876_440_142_910,
                86_421_525_864_086_217,
            ),
            (
                206_530_956_552_673_798,
                1.0,
                366_009_407,
                206_530_956_570_974_268,
            ),
            (
                678_952_360_854_380_006,
                1.0,
                194_240,
                678_952_360_854_389_718,
            ),
            (
                155_019_168_238_433_597,
                1.6,
                155_019_167_720_334_461,
                255_781_627_567_510_492,
            ),
        ];
        for (hits, weight, hot, expected) in cases {
            assert_eq!(
                score(hits, weight, hot),
                expected,
                "{hits} × {weight} + {hot} × 0.05"
            );
        }
    }
}
