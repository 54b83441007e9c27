//! A pseudorandom generator whose output depends on the seed only; the same generator as in `moe_placement::random`.

/// SplitMix64. Its output function is a bijection of a counter, so all seeds are equally good. Source: Steele, Lea and Flood, "Fast
/// splittable pseudorandom number generators" (2014), with the constants of Sebastiano Vigna,
/// <https://prng.di.unimi.it/splitmix64.c>.
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

    /// A uniform number in [0, 1) with 53 random bits, the precision of an f64.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::SplitMix64;

    /// The published first outputs for this seed.
    #[test]
    fn returns_the_published_sequence() {
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
    fn unit_scales_the_upper_bits() {
        let mut random = SplitMix64::new(1_234_567);
        assert_eq!((random.unit() * 1e6).floor(), 350_079.0);
    }
}
