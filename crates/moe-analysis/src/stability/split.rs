//! Learning on one part of a trace and testing on another.

use crate::measures::{TOP_PERCENT, hottest, n_of_percent};
use crate::survey::{Error, Groups, Survey};
use moe_trace::LayerId;

/// What static sets of the hottest experts cover.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Coverage {
    /// Share of each layer's experts that are in the set, in percent, rounded up to whole experts.
    pub percent: usize,
    /// Share of the choices of the part that was learned on. It is what most tools tell, and always flatters.
    pub in_sample: f64,
    /// Share of the choices of the other part.
    pub out_of_sample: f64,
    /// What any set of that size covers of a router that chooses evenly and independently: experts in the set over all
    /// (the null model of cache simulations, c / N).
    pub uniform: f64,
}

/// One split of a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Split {
    /// The part that was tested on.
    pub tested: String,
    /// Tokens learned on, of the layer that routed most; 0 where counts alone are told.
    pub rows_learned: u64,
    /// Tokens tested on.
    pub rows_tested: u64,
    /// For each of [`TOP_PERCENT`].
    pub coverage: Vec<Coverage>,
}

impl Split {
    /// The coverage by sets of `percent` of the experts.
    pub fn of_percent(&self, percent: usize) -> Option<&Coverage> {
        self.coverage.iter().find(|c| c.percent == percent)
    }
}

/// Choices within the sets of one size, and all choices.
#[derive(Debug, Clone, Copy, Default)]
struct Hits {
    hits: f64,
    choices: f64,
}

impl Hits {
    fn add(&mut self, counts: &[u64], hot: &[usize]) {
        let hits = hot.iter().filter_map(|&expert| counts.get(expert));
        self.hits += hits.map(|&count| count as f64).sum::<f64>();
        self.choices += counts.iter().map(|&count| count as f64).sum::<f64>();
    }

    fn share(&self) -> f64 {
        self.hits / self.choices.max(1.0)
    }
}

/// Sums the hits of layers, of one split or of several.
#[derive(Debug, Clone, Default)]
struct Test {
    rows_learned: u64,
    rows_tested: u64,
    hits: [[Hits; 2]; TOP_PERCENT.len()],
}

impl Test {
    fn layer(&mut self, n_expert: usize, learned: (&[u64], u64), tested: (&[u64], u64)) {
        self.rows_learned = self.rows_learned.max(learned.1);
        self.rows_tested = self.rows_tested.max(tested.1);
        for ([inside, outside], percent) in self.hits.iter_mut().zip(TOP_PERCENT) {
            let hot = hottest(learned.0, n_of_percent(n_expert, percent));
            inside.add(learned.0, &hot);
            outside.add(tested.0, &hot);
        }
    }

    fn merge(&mut self, other: &Test) {
        self.rows_learned += other.rows_learned;
        self.rows_tested += other.rows_tested;
        for (sums, more) in self.hits.iter_mut().zip(&other.hits) {
            for (sum, more) in sums.iter_mut().zip(more) {
                sum.hits += more.hits;
                sum.choices += more.choices;
            }
        }
    }

    fn finish(self, tested: String, n_expert: usize) -> Option<Split> {
        let has_both = self.hits[0].iter().all(|hits| hits.choices > 0.0);
        let coverage = self.hits.iter().zip(TOP_PERCENT);
        let coverage = coverage.map(|([inside, outside], percent)| Coverage {
            percent,
            in_sample: inside.share(),
            out_of_sample: outside.share(),
            uniform: n_of_percent(n_expert, percent) as f64 / n_expert.max(1) as f64,
        });
        has_both.then(|| Split {
            tested,
            rows_learned: self.rows_learned,
            rows_tested: self.rows_tested,
            coverage: coverage.collect(),
        })
    }
}

/// Learns on the first `fraction` of each layer's tokens and tests on the rest. The border is that of the nearest window;
/// layers of one window are left out. `None` where nothing is left.
pub fn split_by_time(survey: &Survey, n_expert: u32, fraction: f64) -> Option<Split> {
    let mut test = Test::default();
    for layer in survey.layers() {
        let Some([learned, tested]) = halves(survey, layer, fraction) else {
            continue;
        };
        test.layer(
            n_expert as usize,
            (&learned.0, learned.1),
            (&tested.0, tested.1),
        );
    }
    test.finish("later tokens".into(), n_expert as usize)
}

/// Counts and rows of the first `fraction` of a layer's tokens and of the rest; nothing of a layer of one window.
pub(super) fn halves(
    survey: &Survey,
    layer: LayerId,
    fraction: f64,
) -> Option<[(Vec<u64>, u64); 2]> {
    let windows = survey.windows();
    let len = windows.len(layer);
    if len < 2 {
        return None;
    }
    let border = survey.rows(layer) as f64 * fraction / windows.size() as f64;
    let border = (border.round() as usize).clamp(1, len - 1);
    let part = |range| (windows.counts(layer, &range), windows.rows(layer, &range));
    Some([part(0..border), part(border..len)])
}

/// Learns on all groups but one and tests on that one, for each group; the last row holds all tests together.
///
/// # Errors
/// [`Error::OnePart`] if there are not two groups. `part` names what a group is: `sequence`, `label`.
pub fn split_by_group(
    groups: &Groups,
    layers: &[LayerId],
    n_expert: u32,
    part: &'static str,
) -> Result<Vec<Split>, Error> {
    if groups.names().len() < 2 {
        return Err(Error::OnePart {
            what: "learning on some and testing on others",
            part,
        });
    }
    let mut tests = vec![Test::default(); groups.names().len()];
    for &layer in layers {
        let all: Vec<Vec<u64>> = (0..tests.len()).map(|g| groups.counts(g, layer)).collect();
        let rows: Vec<u64> = (0..tests.len()).map(|g| groups.rows(g, layer)).collect();
        let mut total = vec![0u64; all.iter().map(Vec::len).max().unwrap_or(0)];
        for (sum, count) in all.iter().flat_map(|counts| total_pairs(counts)) {
            total[sum] += count;
        }
        let total_rows: u64 = rows.iter().sum();
        for ((test, counts), &rows) in tests.iter_mut().zip(&all).zip(&rows) {
            let mut others = total.clone();
            for (expert, count) in total_pairs(counts) {
                others[expert] -= count;
            }
            let learned = (&others[..], total_rows - rows);
            test.layer(n_expert as usize, learned, (counts, rows));
        }
    }
    let mut all = Test::default();
    tests.iter().for_each(|test| all.merge(test));
    let names = groups.names().iter().cloned();
    let splits = names
        .zip(tests)
        .filter_map(|(name, test)| test.finish(name, n_expert as usize));
    let mut splits: Vec<Split> = splits.collect();
    splits.extend(all.finish("all".into(), n_expert as usize));
    Ok(splits)
}

fn total_pairs(counts: &[u64]) -> impl Iterator<Item = (usize, u64)> {
    counts.iter().copied().enumerate()
}
