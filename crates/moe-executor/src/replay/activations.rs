//! Reproducible random activations.

use std::f64::consts::TAU;

use moe_engine::random::SplitMix64;
use moe_trace::TokenId;

/// Fills a row with normally distributed values of mean 0 and variance 1, like the output of an RMS norm. The values depend
/// on `seed` and the token's `position` only (Box and Muller, "A note on the generation of random normal deviates", 1958).
pub(super) fn fill(row: &mut [f32], seed: u64, position: TokenId) {
    let of_position = SplitMix64::new(seed).next_u64() ^ u64::from(position.0);
    let mut random = SplitMix64::new(SplitMix64::new(of_position).next_u64());
    for pair in row.chunks_mut(2) {
        let radius = (-2.0 * (1.0 - random.unit()).ln()).sqrt();
        let (sin, cos) = (TAU * random.unit()).sin_cos();
        for (value, part) in pair.iter_mut().zip([cos, sin]) {
            *value = (radius * part) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{TokenId, fill};

    fn row(seed: u64, position: u32) -> Vec<f32> {
        let mut row = vec![0.0; 10_001];
        fill(&mut row, seed, TokenId(position));
        row
    }

    #[test]
    fn values_are_normally_distributed() {
        let row = row(1, 0);
        let n = row.len() as f32;
        let mean = row.iter().sum::<f32>() / n;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / n;
        let within = row.iter().filter(|x| x.abs() < 1.0).count() as f32 / n;
        // Six standard errors: 0.01 of the mean, 0.0141 of the variance, 0.0047 of the fraction.
        assert!(mean.abs() < 0.06, "{mean}");
        assert!((variance - 1.0).abs() < 0.085, "{variance}");
        assert!((within - 0.6827).abs() < 0.028, "{within}");
    }

    #[test]
    fn values_depend_on_seed_and_position_only() {
        assert_eq!(row(3, 7), row(3, 7));
        assert_ne!(row(3, 7), row(3, 8));
        assert_ne!(row(3, 7), row(4, 7));
    }
}
