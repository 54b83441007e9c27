//! Random bytes and numbers for weights. The sequence of a seed is the same on all machines and in all versions.

/// The random number generator SplitMix64. All seeds are valid, because its output is a bijection of a counter.
///
/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), with the constants of Sebastiano Vigna,
/// <https://prng.di.unimi.it/splitmix64.c>. `moe_placement::random` has the same generator.
#[derive(Debug, Clone)]
pub(super) struct SplitMix64(u64);

impl SplitMix64 {
    /// Starts the sequence of `seed`.
    #[inline]
    pub(super) fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// Returns the next 64 bits.
    #[inline]
    pub(super) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a uniform number in [0, 1) with 53 random bits, the precision of f64.
    #[inline]
    pub(super) fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

pub(super) fn fill(random: &mut SplitMix64, bytes: &mut [u8]) {
    let (words, rest) = bytes.as_chunks_mut::<8>();
    for word in words {
        *word = random.next_u64().to_le_bytes();
    }
    let last = random.next_u64().to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Returns a uniformly distributed number with mean 0 and standard deviation 1.
pub(super) fn uniform(random: &mut SplitMix64) -> f64 {
    (2.0 * random.unit() - 1.0) * 3f64.sqrt()
}

#[cfg(test)]
mod tests {
    use super::SplitMix64;

    #[test]
    fn sequence_matches_published_test_vector() {
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

    /// The first output is 6457827717110365317 = 0.35007954 · 2^64.
    #[test]
    fn unit_scales_the_output_to_one() {
        let mut random = SplitMix64::new(1_234_567);
        assert_eq!((random.unit() * 1e6).floor(), 350_079.0);
    }
}
