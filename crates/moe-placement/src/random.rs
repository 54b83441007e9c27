//! A generator whose numbers depend on the seed alone, so that a seed gives the same results everywhere and in every version.
//!
//! `moe-analysis` uses it too. `moe-synth` and `moe-engine`, which do not depend on this crate, have copies.

/// SplitMix64: the output function is a bijection of a counter, so every seed is good. Steele, Lea and Flood, "Fast splittable
/// pseudorandom number generators" (2014); Sebastiano Vigna's constants, <https://prng.di.unimi.it/splitmix64.c>.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The sequence of `seed`.
    #[inline]
    pub fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// The next 64 bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// 0 to `n` - 1, and 0 for 0. The bias, at most n / 2^64, is of no account for lists that fit in memory.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "below `n`")]
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::SplitMix64;

    /// The first outputs that are published for this seed.
    #[test]
    fn sequence_is_the_published_one() {
        let mut random = SplitMix64::new(1_234_567);
        let first: Vec<u64> = (0..5).map(|_| random.next_u64()).collect();
        assert_eq!(
            first,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821
            ]
        );
    }

    /// 6457827717110365317 is 0.35007954 of 2^64.
    #[test]
    fn below_scales_the_bits() {
        let mut random = SplitMix64::new(1_234_567);
        assert_eq!(random.below(1_000_000), 350_079);
        assert_eq!(random.below(0), 0);
    }
}
