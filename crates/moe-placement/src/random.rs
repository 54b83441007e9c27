//! Pseudorandom numbers that depend only on the seed: the same seed yields the same results on every platform and in every
//! version.
//!
//! `moe-analysis` uses this generator too. `moe-synth` and `moe-engine` do not depend on this crate and have copies.

/// SplitMix64 generator. Every seed is good, because the output function is a bijection of a counter.
///
/// Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), with the constants of Sebastiano
/// Vigna, <https://prng.di.unimi.it/splitmix64.c>.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Generator that starts at `seed`.
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

    /// Integer in `0..n`, or 0 if `n` is 0. The bias is at most n / 2^64, which is negligible for lists that fit in memory.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "below `n`")]
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::SplitMix64;

    /// Published outputs for this seed.
    #[test]
    fn produces_published_sequence() {
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

    /// The first output, 6457827717110365317, is 0.35007954 × 2^64.
    #[test]
    fn below_scales_output_to_range() {
        let mut random = SplitMix64::new(1_234_567);
        assert_eq!(random.below(1_000_000), 350_079);
        assert_eq!(random.below(0), 0);
    }
}
