//! Random bytes and numbers for weights: fast, and the same for the same seed.

use moe_random::SplitMix64;

pub(super) fn fill(random: &mut SplitMix64, bytes: &mut [u8]) {
    let (words, rest) = bytes.as_chunks_mut::<8>();
    for word in words {
        *word = random.next_u64().to_le_bytes();
    }
    let last = random.next_u64().to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// A number of mean 0 and standard deviation 1, evenly distributed.
pub(super) fn even(random: &mut SplitMix64) -> f64 {
    (2.0 * random.unit() - 1.0) * 3f64.sqrt()
}
