//! Quantiles of sorted values.

/// The value below which a share of the sorted values lies, between neighbours by a line (type 7 of Hyndman and Fan 1996, NumPy's default).
pub(crate) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    let (low, high) = (
        sorted[place.floor() as usize],
        sorted[place.ceil() as usize],
    );
    low + (high - low) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_numpys() {
        // numpy.quantile([1, 2, 4, 8], q)
        let values = [1.0, 2.0, 4.0, 8.0];
        assert_eq!(quantile(&values, 0.0), 1.0);
        assert_eq!(quantile(&values, 0.5), 3.0);
        assert_eq!(quantile(&values, 1.0), 8.0);
        assert!((quantile(&values, 0.025) - 1.075).abs() < 1e-12);
    }
}
