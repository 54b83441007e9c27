//! Charts of the routing: coverage, stability, caches, load balance.

use moe_analysis::Phases;
use moe_analysis::hotness::Hotness;
use moe_analysis::measures::hottest;
use moe_analysis::simulate::{Batches, PolicyResult, SimulateOptions, simulate};
use moe_analysis::stability::{curves, drift};
use moe_analysis::survey::Survey;
use moe_placement::cache::{OnlinePolicy, PolicyName};
use moe_placement::plan::MIB;

use crate::document::{Axis, Chart, Series};

/// Maximum number of points of a series.
const MAX_POINTS: usize = 4000;
/// Number of simulated cache sizes.
const N_BUDGETS: u64 = 12;
/// Simulated policies, the best first.
const POLICIES: [PolicyName; 4] = [
    PolicyName::Belady,
    PolicyName::Shared(OnlinePolicy::Lfu),
    PolicyName::Shared(OnlinePolicy::Lru),
    PolicyName::Shared(OnlinePolicy::Random),
];

/// At most [`MAX_POINTS`] of these points, evenly spaced, with the first and the last point.
pub(crate) fn reduced(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let n = points.len();
    if n <= MAX_POINTS {
        return points;
    }
    let parts = MAX_POINTS - 1;
    let kept = (0..MAX_POINTS).map(|part| part * (n - 1) / parts);
    kept.filter_map(|i| points.get(i).copied()).collect()
}

/// The percentage of the experts of a layer that `n` experts are.
fn percent(n: usize, n_expert: usize) -> f64 {
    100.0 * n as f64 / n_expert.max(1) as f64
}

/// A curve of fractions by number of experts, in percent.
fn curve(name: &str, shares: &[f64]) -> Series {
    let n_expert = shares.len().saturating_sub(1);
    let points = shares.iter().enumerate();
    let points = points.map(|(n, share)| (percent(n, n_expert), 100.0 * share));
    Series::line(name, reduced(points.collect()))
}

/// The coverage of a uniform router.
fn uniform() -> Series {
    Series::line("uniform router", [(0.0, 0.0), (100.0, 100.0)]).dashed()
}

/// The coverage of all tokens, in-sample, by number of experts (`[n_expert + 1]`).
fn covered(hotness: &Hotness) -> Vec<f64> {
    let n_expert = hotness.n_expert() as usize;
    let layers = hotness.layers(Phases::All).into_iter();
    let layers: Vec<Vec<u64>> = layers
        .map(|layer| hotness.counts(layer, Phases::All))
        .collect();
    let total: f64 = layers.iter().flatten().map(|&count| count as f64).sum();
    let mut shares = vec![0.0; n_expert + 1];
    for counts in &layers {
        for (rank, expert) in hottest(counts, n_expert).into_iter().enumerate() {
            shares[rank + 1] += counts[expert] as f64 / total.max(1.0);
        }
    }
    for n in 1..shares.len() {
        shares[n] += shares[n - 1];
    }
    shares
}

/// The coverage of the hottest experts.
pub(crate) fn coverage(input: usize, hotness: &Hotness) -> Chart {
    Chart {
        id: format!("coverage-{input}"),
        group: "coverage",
        input: Some(input),
        title: "Coverage of the hottest experts".to_owned(),
        note: Some(
            "Fraction of the selections that the hottest experts of each layer cover, on the same tokens (in-sample).".to_owned(),
        ),
        x: Axis::percent("hottest experts of each layer (%)"),
        y: Axis::percent("selections covered (%)"),
        series: vec![curve("all tokens, in-sample", &covered(hotness)), uniform()],
    }
}

/// The coverage of a training split and a held-out split, and the drift. Empty for a trace without the order of tokens.
pub(crate) fn stability(input: usize, hotness: &Hotness, survey: &Survey) -> Vec<Chart> {
    let mut charts = Vec::new();
    if !survey.is_ordered() {
        return charts;
    }
    if let Some(curves) = curves(survey, hotness.n_expert() as usize, 0.5) {
        charts.push(Chart {
            id: format!("stability-{input}"),
            group: "stability",
            input: Some(input),
            title: "Coverage of held-out tokens".to_owned(),
            note: Some(
                "The hottest experts are those of the first half of the tokens (training split). The second half is held out.".to_owned(),
            ),
            x: Axis::percent("hottest experts of each layer (%)"),
            y: Axis::percent("selections covered (%)"),
            series: vec![
                curve("training split, in-sample", &curves.in_sample),
                curve("held-out split, out-of-sample", &curves.out_of_sample),
                uniform(),
            ],
        });
    }
    let rows = drift(survey, hotness.n_expert());
    let steps = rows
        .iter()
        .filter(|row| row.layer.is_none() && row.to == row.from + 1);
    let steps: Vec<(f64, f64, f64)> = steps
        .map(|row| {
            let distance = [row.total_variation, row.noise].map(|value| 100.0 * value);
            (row.to as f64 + 1.0, distance[0], distance[1])
        })
        .collect();
    if !steps.is_empty() {
        let measured = steps.iter().map(|&(x, distance, _)| (x, distance));
        let noise = steps.iter().map(|&(x, _, noise)| (x, noise));
        charts.push(Chart {
            id: format!("drift-{input}"),
            group: "stability",
            input: Some(input),
            title: "Drift between consecutive spans of tokens".to_owned(),
            note: Some(
                "Total variation distance of the selected experts from those of the span before, as the mean of the layers. \
                 The spans have equal numbers of tokens."
                    .to_owned(),
            ),
            x: Axis::new("span of tokens", "linear"),
            y: Axis::percent("total variation distance (%)"),
            series: vec![
                Series::line("measured", measured),
                Series::line("expected without drift", noise).dashed(),
            ],
        });
    }
    charts
}

/// Load balance of each layer.
pub(crate) fn balance(input: usize, hotness: &Hotness) -> Chart {
    let layers = hotness.summary(Phases::All, 0);
    let series = |name: &str, of: fn(&moe_analysis::measures::LoadBalance) -> f64| {
        let points = layers.iter().map(|layer| {
            let value = of(&layer.load_balance);
            let x = f64::from(layer.layer.0);
            (x, Some(value).filter(|value| value.is_finite()))
        });
        Series::new(name, "line", points)
    };
    Chart {
        id: format!("balance-{input}"),
        group: "other",
        input: Some(input),
        title: "Load balance of the layers".to_owned(),
        note: Some(
            "A Gini coefficient of 0 and an entropy of 1 mean that all experts are selected equally often.".to_owned(),
        ),
        x: Axis::new("layer", "linear"),
        y: Axis {
            min: Some(0.0),
            max: Some(1.0),
            ..Axis::new("measure (0 to 1)", "linear")
        },
        series: vec![
            series("entropy", |balance| balance.entropy),
            series("Gini coefficient", |balance| balance.gini),
        ],
    }
}

/// Hit rates of caches by size. Without `has_sizes`, the size of each expert is 1, so that budgets are numbers of experts.
///
/// # Errors
/// The trace cannot be simulated.
pub(crate) fn caches(
    input: usize,
    batches: &Batches,
    has_sizes: bool,
) -> Result<Option<Chart>, moe_analysis::simulate::Error> {
    let total = batches.experts().total_bytes();
    let parts = (1..=N_BUDGETS).map(|part| {
        let bytes = u128::from(total) * u128::from(part) / u128::from(N_BUDGETS);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    });
    let mut budgets: Vec<u64> = parts.filter(|&bytes| bytes > 0).collect();
    budgets.dedup();
    if batches.n_look_ups() == 0 || budgets.is_empty() {
        return Ok(None);
    }
    let options = SimulateOptions {
        learn: None,
        train_fraction: 0.1,
        update_rate: 0.1,
        seed: 0,
    };
    let rows = simulate(batches, &budgets, &POLICIES, &options, || {})?;
    let is_decode = rows
        .iter()
        .all(|row| row.outcome.hit_pct_decode().is_some());
    let hit_rate = |row: &PolicyResult| match row.outcome.hit_pct_decode() {
        Some(rate) if is_decode => rate,
        _ => row.outcome.hit_pct_cum(),
    };
    let unit = if has_sizes { MIB as f64 } else { 1.0 };
    let series = POLICIES.iter().map(|policy| {
        let rows = rows.iter().filter(|row| row.policy == *policy);
        let points = rows.map(|row| (row.budget as f64 / unit, hit_rate(row)));
        Series::line(policy.to_string(), points)
    });
    let lookups = if is_decode {
        "lookups of generated tokens"
    } else {
        "all lookups"
    };
    Ok(Some(Chart {
        id: format!("cache-{input}"),
        group: "cache",
        input: Some(input),
        title: "Hit rate of an expert cache by size".to_owned(),
        note: Some(format!(
            "Simulated caches that all layers share; {lookups}. Belady's policy knows the future: it is the upper bound."
        )),
        x: Axis {
            min: Some(0.0),
            ..Axis::new(
                if has_sizes {
                    "cache size (MiB)"
                } else {
                    "cache size (experts)"
                },
                "linear",
            )
        },
        y: Axis::percent("hit rate (%)"),
        series: series.collect(),
    }))
}

/// A chart that compares a series of the same chart of both inputs.
pub(crate) fn comparison(
    charts: &[Chart],
    names: &[&str],
    id: &str,
    series: &str,
) -> Option<Chart> {
    let of_input = |input: usize| {
        let mut charts = charts.iter();
        let chart = charts.find(|chart| chart.id == format!("{id}-{input}"))?;
        let mut found = chart.series.iter();
        let found = found.find(|found| found.name == series)?;
        let name = names.get(input)?;
        let series = Series {
            name: format!("{name}: {series}"),
            input: Some(input),
            ..found.clone()
        };
        Some((chart, series))
    };
    let ((first, a), (second, b)) = (of_input(0)?, of_input(1)?);
    // Sizes in MiB and numbers of experts cannot be compared.
    (first.x.label == second.x.label).then(|| Chart {
        id: format!("{id}-compared"),
        group: first.group,
        input: None,
        title: format!("{}: both inputs", first.title),
        note: first.note.clone(),
        x: first.x.clone(),
        y: first.y.clone(),
        series: vec![a, b],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reduces_long_series() {
        let points: Vec<(f64, f64)> = (0..10_001).map(|i| (f64::from(i), 0.0)).collect();
        let few = reduced(points);
        assert_eq!(few.len(), MAX_POINTS);
        assert_eq!((few[0].0, few[MAX_POINTS - 1].0), (0.0, 10_000.0));
        assert!(few.is_sorted());
    }

    #[test]
    fn compares_series_of_the_same_unit() {
        let chart = |input: usize, unit: &str| Chart {
            id: format!("cache-{input}"),
            group: "cache",
            input: Some(input),
            title: "Hit rate".to_owned(),
            note: None,
            x: Axis::new(unit, "linear"),
            y: Axis::percent("hit rate (%)"),
            series: vec![Series::line("lru", [(0.0, 1.0)]), uniform()],
        };
        let compared = |units: [&str; 2]| {
            let charts = [chart(0, units[0]), chart(1, units[1])];
            comparison(&charts, &["a", "b"], "cache", "lru")
        };
        let both = compared(["MiB", "MiB"]).unwrap();
        assert_eq!(
            (both.series[1].name.as_str(), both.series[1].input),
            ("b: lru", Some(1))
        );
        assert!(compared(["MiB", "experts"]).is_none());
    }
}
