//! Filling of free memory with experts that were never selected, in a seeded random order.

use crate::random::SplitMix64;

/// Shuffles items (Fisher-Yates). The order depends only on the seed.
pub(super) fn shuffled<T>(mut items: Vec<T>, seed: u64) -> Vec<T> {
    let mut random = SplitMix64::new(seed);
    for last in (1..items.len()).rev() {
        items.swap(last, random.below(last + 1));
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffle_depends_only_on_seed() {
        let items: Vec<u32> = (0..100).collect();
        let one = shuffled(items.clone(), 7);
        assert_eq!(one, shuffled(items.clone(), 7));
        assert_ne!(one, shuffled(items.clone(), 8));
        let mut sorted = one.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, items);
        assert_ne!(one, items);
    }
}
