//! Coverage of hot sets on held-out data: hot sets of a training split, evaluated on a held-out split.

use crate::measures::{TOP_PERCENT, hottest, n_of_percent};
use crate::survey::{Error, Groups, Survey};
use moe_trace::LayerId;

/// Fraction of the selections (0.0 to 1.0) that the hot sets of all layers cover.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Coverage {
    /// Size of a hot set in percent of the layer's experts, rounded up to an integer number of experts.
    pub percent: usize,
    /// Coverage on the training split. It is biased upward, although many tools report only this value.
    pub in_sample: f64,
    /// Coverage on the held-out split.
    pub out_of_sample: f64,
    /// Coverage of any set of this size with a uniform router: c / N for c experts.
    pub uniform: f64,
}

/// Coverage for one split of a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Split {
    /// Name of the held-out split.
    pub held_out: String,
    /// Number of tokens of the training split, in the layer with the most tokens; 0 if the trace contains only counts.
    pub train_tokens: u64,
    /// Number of tokens of the held-out split, in the layer with the most tokens.
    pub held_out_tokens: u64,
    /// Coverage for each of [`TOP_PERCENT`].
    pub coverage: Vec<Coverage>,
}

impl Split {
    /// Coverage for hot sets of `percent` % of the experts.
    pub fn of_percent(&self, percent: usize) -> Option<&Coverage> {
        self.coverage.iter().find(|c| c.percent == percent)
    }
}

/// Selections that hot sets cover, and all selections.
#[derive(Debug, Clone, Copy, Default)]
struct Hits {
    hits: f64,
    selections: f64,
}

impl Hits {
    fn add(&mut self, counts: &[u64], hot: &[usize]) {
        let hits = hot.iter().filter_map(|&expert| counts.get(expert));
        self.hits += hits.map(|&count| count as f64).sum::<f64>();
        self.selections += counts.iter().map(|&count| count as f64).sum::<f64>();
    }

    fn share(&self) -> f64 {
        self.hits / self.selections.max(1.0)
    }
}

/// Sums of hits over layers, for one split or for several.
#[derive(Debug, Clone, Default)]
struct Evaluation {
    train_tokens: u64,
    held_out_tokens: u64,
    /// By [`TOP_PERCENT`]: hits on the training and on the held-out split.
    hits: [[Hits; 2]; TOP_PERCENT.len()],
}

impl Evaluation {
    fn layer(&mut self, n_expert: usize, training: (&[u64], u64), held_out: (&[u64], u64)) {
        self.train_tokens = self.train_tokens.max(training.1);
        self.held_out_tokens = self.held_out_tokens.max(held_out.1);
        for ([in_sample, out_of_sample], percent) in self.hits.iter_mut().zip(TOP_PERCENT) {
            let hot = hottest(training.0, n_of_percent(n_expert, percent));
            in_sample.add(training.0, &hot);
            out_of_sample.add(held_out.0, &hot);
        }
    }

    fn merge(&mut self, other: &Evaluation) {
        self.train_tokens += other.train_tokens;
        self.held_out_tokens += other.held_out_tokens;
        for (sums, more) in self.hits.iter_mut().zip(&other.hits) {
            for (sum, more) in sums.iter_mut().zip(more) {
                sum.hits += more.hits;
                sum.selections += more.selections;
            }
        }
    }

    fn finish(self, held_out: String, n_expert: usize) -> Option<Split> {
        let has_both = self.hits[0].iter().all(|hits| hits.selections > 0.0);
        let coverage = self.hits.iter().zip(TOP_PERCENT);
        let coverage = coverage.map(|([in_sample, out_of_sample], percent)| Coverage {
            percent,
            in_sample: in_sample.share(),
            out_of_sample: out_of_sample.share(),
            uniform: n_of_percent(n_expert, percent) as f64 / n_expert.max(1) as f64,
        });
        has_both.then(|| Split {
            held_out,
            train_tokens: self.train_tokens,
            held_out_tokens: self.held_out_tokens,
            coverage: coverage.collect(),
        })
    }
}

/// Coverage with the first `fraction` of each layer's tokens as the training split and the rest as the held-out split. The
/// border is rounded to windows; layers with one window are omitted. `None` if a split has no selections.
pub fn split_by_time(survey: &Survey, n_expert: u32, fraction: f64) -> Option<Split> {
    let mut evaluation = Evaluation::default();
    for layer in survey.layers() {
        let Some([training, held_out]) = halves(survey, layer, fraction) else {
            continue;
        };
        evaluation.layer(
            n_expert as usize,
            (&training.0, training.1),
            (&held_out.0, held_out.1),
        );
    }
    evaluation.finish("later tokens".into(), n_expert as usize)
}

/// Counts and tokens of the first `fraction` of a layer's tokens and of the rest; `None` for a layer with one window.
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
    let border = survey.routed_tokens(layer) as f64 * fraction / windows.size() as f64;
    let border = (border.round() as usize).clamp(1, len - 1);
    let part = |range| {
        (
            windows.counts(layer, &range),
            windows.routed_tokens(layer, &range),
        )
    };
    Some([part(0..border), part(border..len)])
}

/// Leave-one-out coverage: for each group, the other groups are the training split. The last element summarizes all groups.
///
/// `part` names the kind of group in errors: `sequence` or `label`.
///
/// # Errors
/// [`Error::OnePart`] if there are fewer than two groups.
pub fn split_by_group(
    groups: &Groups,
    layers: &[LayerId],
    n_expert: u32,
    part: &'static str,
) -> Result<Vec<Split>, Error> {
    if groups.names().len() < 2 {
        return Err(Error::OnePart { part });
    }
    let mut evaluations = vec![Evaluation::default(); groups.names().len()];
    for &layer in layers {
        let n_groups = evaluations.len();
        let all: Vec<Vec<u64>> = (0..n_groups).map(|g| groups.counts(g, layer)).collect();
        let tokens: Vec<u64> = (0..n_groups)
            .map(|g| groups.routed_tokens(g, layer))
            .collect();
        let mut total = vec![0u64; all.iter().map(Vec::len).max().unwrap_or(0)];
        for (expert, count) in all.iter().flat_map(|counts| indexed(counts)) {
            total[expert] += count;
        }
        let total_tokens: u64 = tokens.iter().sum();
        for ((evaluation, counts), &tokens) in evaluations.iter_mut().zip(&all).zip(&tokens) {
            let mut others = total.clone();
            for (expert, count) in indexed(counts) {
                others[expert] -= count;
            }
            let training = (&others[..], total_tokens - tokens);
            evaluation.layer(n_expert as usize, training, (counts, tokens));
        }
    }
    let mut all = Evaluation::default();
    evaluations
        .iter()
        .for_each(|evaluation| all.merge(evaluation));
    let names = groups.names().iter().cloned();
    let splits = names
        .zip(evaluations)
        .filter_map(|(name, evaluation)| evaluation.finish(name, n_expert as usize));
    let mut splits: Vec<Split> = splits.collect();
    splits.extend(all.finish("all".into(), n_expert as usize));
    Ok(splits)
}

fn indexed(counts: &[u64]) -> impl Iterator<Item = (usize, u64)> {
    counts.iter().copied().enumerate()
}
