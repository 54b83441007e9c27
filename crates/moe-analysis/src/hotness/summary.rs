//! A few numbers that tell how evenly a layer uses its experts.

use super::{Hotness, Phases};

/// How one layer spreads its choices.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSummary {
    /// Block number in the model.
    pub layer: u32,
    /// Tokens routed.
    pub rows: u64,
    /// Experts chosen at least once.
    pub n_active: u32,
    /// `(expert, share of the layer's choices)`, hottest first.
    pub top: Vec<(u32, f64)>,
    /// Share of the choices that fell on the hottest tenth of the experts (rounded up to whole experts).
    pub share_top_10: f64,
    /// The same for the hottest quarter.
    pub share_top_25: f64,
    /// Shannon entropy of the shares over that of an even spread: 1 is even, 0 is one expert alone.
    pub entropy: f64,
    /// Choices of the hottest expert over the mean of all.
    pub max_over_mean: f64,
}

impl Hotness {
    /// One summary for each layer that routed something, with its `n_top` hottest experts.
    pub fn summary(&self, phases: Phases, n_top: usize) -> Vec<LayerSummary> {
        self.layers(phases)
            .into_iter()
            .map(|layer| {
                let counts: Vec<u64> = self
                    .experts(layer, phases)
                    .iter()
                    .map(|tally| tally.count)
                    .collect();
                summarise(layer, self.rows(layer, phases), &counts, n_top)
            })
            .collect()
    }
}

/// `counts` is `[n_expert]`, by expert id.
fn summarise(layer: u32, rows: u64, counts: &[u64], n_top: usize) -> LayerSummary {
    let mut hottest: Vec<(u32, u64)> = (0u32..).zip(counts.iter().copied()).collect();
    hottest.sort_by_key(|&(expert, count)| (std::cmp::Reverse(count), expert));
    let total = counts.iter().sum::<u64>().max(1) as f64;
    let share = |count: u64| count as f64 / total;
    let share_of_first = |n: usize| hottest.iter().take(n).map(|&(_, count)| share(count)).sum();
    let active = hottest.iter().take_while(|&&(_, count)| count > 0);
    let nats: f64 = active
        .clone()
        .map(|&(_, count)| -share(count) * share(count).ln())
        .sum();
    let n_expert = counts.len();
    LayerSummary {
        layer,
        rows,
        n_active: active.count() as u32,
        top: hottest
            .iter()
            .take(n_top)
            .map(|&(expert, count)| (expert, share(count)))
            .collect(),
        share_top_10: share_of_first(n_expert.div_ceil(10)),
        share_top_25: share_of_first(n_expert.div_ceil(4)),
        entropy: if n_expert > 1 {
            nats / (n_expert as f64).ln()
        } else {
            0.0
        },
        max_over_mean: hottest
            .first()
            .map_or(0.0, |&(_, count)| share(count) * n_expert as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_and_lopsided_layers() {
        let even = summarise(0, 10, &[5; 8], 1);
        assert!((even.entropy - 1.0).abs() < 1e-12);
        assert_eq!(even.max_over_mean, 1.0);
        assert_eq!(even.share_top_10, 0.125);
        assert_eq!(even.share_top_25, 0.25);

        let one = summarise(1, 7, &[0, 0, 7, 0], 2);
        assert_eq!(one.entropy, 0.0);
        assert_eq!(one.max_over_mean, 4.0);
        assert_eq!(one.n_active, 1);
        assert_eq!(one.top, [(2, 1.0), (0, 0.0)]);

        // Shares 1/2, 1/4, 1/4, 0: 1.5 bits of 2.
        let some = summarise(2, 4, &[1, 2, 0, 1], 3);
        assert!((some.entropy - 0.75).abs() < 1e-12);
        assert_eq!(some.top, [(1, 0.5), (0, 0.25), (3, 0.25)]);
        assert_eq!(some.n_active, 3);
    }
}
