//! Quantiles of sorted values.

/// Quantile of sorted values, linearly interpolated: type 7 of Hyndman and Fan, "Sample quantiles in statistical packages"
/// (1996), the default of `numpy.quantile`. `q` is 0.0 to 1.0.
///
/// # Panics
/// If `sorted` is empty.
pub(crate) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let position = q * (sorted.len() - 1) as f64;
    let (low, high) = (
        sorted[position.floor() as usize],
        sorted[position.ceil() as usize],
    );
    low + (high - low) * position.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_numpy() {
        // numpy.quantile([1, 2, 4, 8], q)
        let values = [1.0, 2.0, 4.0, 8.0];
        assert_eq!(quantile(&values, 0.0), 1.0);
        assert_eq!(quantile(&values, 0.5), 3.0);
        assert_eq!(quantile(&values, 1.0), 8.0);
        assert!((quantile(&values, 0.025) - 1.075).abs() < 1e-12);
    }
}
