//! Ratios of times that were measured alternately.

/// The median of paired ratios, and its 95 % confidence interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PairedRatio {
    pub median: f64,
    /// Bounds of the interval; `None` with fewer than 6 pairs, which cannot have this confidence.
    pub interval: Option<(f64, f64)>,
}

impl PairedRatio {
    /// The ratios `times[i] / base[i]`. Returns `None` without pairs.
    ///
    /// The interval makes no assumption about the distribution: its bounds are the k-th smallest and the k-th largest ratio, with the
    /// largest k for which the median is outside of them with a probability of at most 5 %. The number of ratios below the median
    /// has the binomial distribution with p = 1/2.
    pub fn new(times: &[f64], base: &[f64]) -> Option<PairedRatio> {
        let mut ratios: Vec<f64> = times.iter().zip(base).map(|(a, b)| a / b).collect();
        ratios.sort_by(f64::total_cmp);
        let n = ratios.len();
        let median = f64::midpoint(*ratios.get(n.checked_sub(1)? / 2)?, *ratios.get(n / 2)?);
        // The logarithm, because 2^-n underflows for large n.
        let mut probability = n as f64 * 0.5f64.ln();
        let mut below = 0.0;
        let mut k = 0;
        while k < n / 2 && below + probability.exp() <= 0.025 {
            below += probability.exp();
            probability += ((n - k) as f64 / (k + 1) as f64).ln();
            k += 1;
        }
        Some(PairedRatio {
            median,
            interval: k.checked_sub(1).map(|k| (ratios[k], ratios[n - 1 - k])),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::PairedRatio;

    fn of(ratios: &[f64]) -> Option<PairedRatio> {
        let base = vec![2.0; ratios.len()];
        let times: Vec<f64> = ratios.iter().map(|ratio| 2.0 * ratio).collect();
        PairedRatio::new(&times, &base)
    }

    #[test]
    fn median_of_pairs() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[3.0]).unwrap().median, 3.0);
        assert_eq!(of(&[4.0, 1.0]).unwrap().median, 2.5);
        assert_eq!(of(&[4.0, 1.0, 2.0]).unwrap().median, 2.0);
    }

    /// Ranks of the bounds for n = 5, 6, 9, 10, 20 in tables of the sign test at 5 %: none, 1, 2, 2, 6.
    #[test]
    fn interval_has_the_ranks_of_the_sign_test() {
        let interval = |n: u32| {
            let ratios: Vec<f64> = (1..=n).rev().map(f64::from).collect();
            of(&ratios).unwrap().interval
        };
        assert_eq!(interval(5), None);
        assert_eq!(interval(6), Some((1.0, 6.0)));
        assert_eq!(interval(9), Some((2.0, 8.0)));
        assert_eq!(interval(10), Some((2.0, 9.0)));
        assert_eq!(interval(20), Some((6.0, 15.0)));
        assert_eq!(interval(2000), Some((956.0, 1045.0)));
    }
}
