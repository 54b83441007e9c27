//! The rows of `--table`. None has more than a few rows for each layer, whatever the length of the trace.

use std::io::{self, Write};

use moe_analysis::measures::{
    Specialisation, Spread, distinct_if_independent, distinct_if_uniform, mutual_information,
    specialisation, total_variation,
};
use moe_analysis::stability::{self, Split, split_by_group, split_by_time};
use moe_analysis::survey::{Survey, TokenPairs};
use moe_placement::learn::LayerCounts;

use super::args::{self, Args, TableChoice};
use super::input::Counted;
use crate::output::{Cell, Format, Table};

/// Writes the rows of a table; `splits` are those of [`splits`].
pub fn write(
    out: &mut dyn Write,
    format: Format,
    table: TableChoice,
    args: &Args,
    counted: &Counted,
    splits: &[Split],
) -> io::Result<()> {
    match table {
        TableChoice::Matrix | TableChoice::Measures => measures(out, format, args, counted),
        TableChoice::Overall => overall(out, format, args, counted),
        TableChoice::Split => split(out, format, splits),
        TableChoice::Drift => drift(out, format, counted),
        TableChoice::Settling => settling(out, format, counted),
        TableChoice::Batches => batches(out, format, args, counted),
        TableChoice::Domains => domains(out, format, args, counted),
        TableChoice::Bootstrap => bootstrap(out, format, args, counted),
    }
}

/// A layer's number; of all layers `all` for a person, null for a program.
fn layer_cell(layer: Option<u32>, format: Format) -> Cell<'static> {
    match (layer, format) {
        (None, Format::Table | Format::Md) => "all".into(),
        (layer, _) => layer.into(),
    }
}

/// A layer, or all layers together.
struct Layer {
    /// `None`: all.
    layer: Option<u32>,
    rows: u64,
    spread: Spread,
    /// `None`: counts alone are known.
    order: Option<TokenPairs>,
}

/// What is measured of a layer: name, header, value.
type Measure = (&'static str, &'static str, fn(&Layer) -> Option<f64>);

const MEASURES: [Measure; 14] = [
    ("active", "active", |layer| {
        Some(layer.spread.n_active as f64)
    }),
    ("active_fraction", "active fraction", |layer| {
        Some(layer.spread.active_fraction())
    }),
    ("top_1", "coverage of top 1 %", |layer| {
        Some(layer.spread.share_top[0])
    }),
    ("top_5", "coverage of top 5 %", |layer| {
        Some(layer.spread.share_top[1])
    }),
    ("top_10", "coverage of top 10 %", |layer| {
        Some(layer.spread.share_top[2])
    }),
    ("top_25", "coverage of top 25 %", |layer| {
        Some(layer.spread.share_top[3])
    }),
    ("top_50", "coverage of top 50 %", |layer| {
        Some(layer.spread.share_top[4])
    }),
    ("gini", "Gini", |layer| Some(layer.spread.gini)),
    ("entropy", "entropy", |layer| Some(layer.spread.entropy)),
    ("max_over_mean", "max/mean", |layer| {
        Some(layer.spread.max_over_mean)
    }),
    ("effective", "effective experts", |layer| {
        Some(layer.spread.effective)
    }),
    ("overlap", "overlap", |layer| {
        layer.order.as_ref()?.overlap()
    }),
    ("repeat_first", "first repeats", |layer| {
        layer.order.as_ref()?.repeat_first()
    }),
    ("repeat_first_two", "first two repeat", |layer| {
        layer.order.as_ref()?.repeat_first_two()
    }),
];

/// Every layer, then all together.
fn measured(args: &Args, counted: &Counted) -> (Vec<Layer>, Layer) {
    let (hotness, survey) = (&counted.hotness, &counted.survey);
    let layers = hotness.summary(args.phases(), 0).into_iter();
    let layers = layers.map(|layer| Layer {
        layer: Some(layer.layer),
        rows: layer.rows,
        spread: layer.spread,
        order: survey.order(layer.layer).cloned(),
    });
    let all = Layer {
        layer: None,
        rows: hotness.tokens(args.phases()),
        spread: hotness.overall(args.phases()),
        order: Some(order_of_all(survey)),
    };
    (layers.collect(), all)
}

/// Consecutive tokens of all layers together.
fn order_of_all(survey: &Survey) -> TokenPairs {
    let mut all = TokenPairs::default();
    let orders = survey
        .layers()
        .into_iter()
        .filter_map(|layer| survey.order(layer));
    orders.for_each(|order| all.merge(order));
    all
}

fn measures(out: &mut dyn Write, format: Format, args: &Args, counted: &Counted) -> io::Result<()> {
    let (layers, all) = measured(args, counted);
    let mut table = Table::of(layers.iter().chain([&all]))
        .column("layer_id", "layer", move |row| {
            layer_cell(row.layer, format)
        })
        .column("rows", "tokens", |row| (row.rows > 0).then_some(row.rows))
        .column("choices", "activations", |row| row.spread.choices)
        .column("active", "active", |row| row.spread.n_active);
    // The number of active experts is an integer here.
    for (name, header, value) in MEASURES.into_iter().skip(1) {
        table = table.column(name, header, move |row| value(row));
    }
    table.write(out, format)
}

/// A measure over all layers.
struct Overall {
    measure: &'static str,
    model: Option<f64>,
    layer_mean: Option<f64>,
    /// Layer and value.
    least: Option<(u32, f64)>,
    most: Option<(u32, f64)>,
}

impl Overall {
    fn of((measure, _, value): Measure, layers: &[Layer], all: &Layer) -> Overall {
        let known = layers.iter();
        let known = known.filter_map(|layer| Some((layer.layer?, value(layer)?)));
        let known: Vec<(u32, f64)> = known.collect();
        let sum: f64 = known.iter().map(|(_, value)| value).sum();
        let values = known.iter().copied();
        Overall {
            measure,
            model: value(all),
            layer_mean: (!known.is_empty()).then(|| sum / known.len() as f64),
            // Of equal ones the lower layer.
            least: values.clone().reduce(|a, b| if b.1 < a.1 { b } else { a }),
            most: values.reduce(|a, b| if b.1 > a.1 { b } else { a }),
        }
    }
}

fn overall(out: &mut dyn Write, format: Format, args: &Args, counted: &Counted) -> io::Result<()> {
    let (layers, all) = measured(args, counted);
    let rows = MEASURES.map(|measure| Overall::of(measure, &layers, &all));
    Table::of(&rows)
        .column("measure", "measure", |row| row.measure)
        .column("model", "model", |row| row.model)
        .column("layer_mean", "mean of layers", |row| row.layer_mean)
        .column("least", "min", |row| row.least.map(|(_, value)| value))
        .column("least_layer", "min, layer", |row| {
            row.least.map(|(layer, _)| layer)
        })
        .column("most", "max", |row| row.most.map(|(_, value)| value))
        .column("most_layer", "max, layer", |row| {
            row.most.map(|(layer, _)| layer)
        })
        .write(out, format)
}

/// What was learned on one part, tested on another.
pub fn splits(args: &Args, counted: &Counted) -> anyhow::Result<Vec<Split>> {
    let Counted {
        hotness, survey, ..
    } = counted;
    let layers = hotness.layers(args.phases());
    let n_expert = hotness.n_expert();
    Ok(match args.split.unwrap_or(args::Split::Time(0.5)) {
        args::Split::Time(fraction) => Vec::from_iter(split_by_time(survey, n_expert, fraction)),
        args::Split::BySequence => split_by_group(survey.folds(), &layers, n_expert, "sequence")?,
        args::Split::ByLabel => split_by_group(survey.labels(), &layers, n_expert, "label")?,
    })
}

/// Writes what was learned on one part and tested on another: a row for each part and size of the hot set.
pub fn split(out: &mut dyn Write, format: Format, splits: &[Split]) -> io::Result<()> {
    let rows = splits.iter().flat_map(|split| {
        let coverage = split.coverage.iter();
        coverage.map(move |coverage| (split, coverage))
    });
    Table::of(rows)
        .column("tested", "held-out split", |(split, _)| {
            split.tested.as_str()
        })
        .column("rows_learned", "training (tokens)", |(split, _)| {
            split.rows_learned
        })
        .column("rows_tested", "held out (tokens)", |(split, _)| {
            split.rows_tested
        })
        .column("percent", "hottest experts (%)", |(_, coverage)| {
            coverage.percent
        })
        .column("in_sample", "coverage in-sample", |(_, coverage)| {
            coverage.in_sample
        })
        .column(
            "out_of_sample",
            "coverage out-of-sample",
            |(_, coverage)| coverage.out_of_sample,
        )
        .column("uniform", "uniform router", |(_, coverage)| {
            coverage.uniform
        })
        .write(out, format)
}

fn drift(out: &mut dyn Write, format: Format, counted: &Counted) -> io::Result<()> {
    let rows = stability::drift(&counted.survey, counted.hotness.n_expert());
    Table::of(&rows)
        .column("layer_id", "layer", move |row| {
            layer_cell(row.layer, format)
        })
        .column("from", "from span", |row| row.from)
        .column("to", "to span", |row| row.to)
        .column("rows", "tokens", |row| row.rows)
        .column("total_variation", "total variation", |row| {
            row.total_variation
        })
        .column("noise", "expected by chance", |row| row.noise)
        .column("jaccard", "Jaccard index of the hot sets", |row| {
            row.jaccard
        })
        .write(out, format)
}

fn settling(out: &mut dyn Write, format: Format, counted: &Counted) -> io::Result<()> {
    let rows = stability::settling(&counted.survey, counted.hotness.n_expert());
    Table::of(&rows)
        .column("layer_id", "layer", |row| row.layer)
        .column("rows", "tokens", |row| row.rows)
        .column("settled", "converged after (tokens)", |row| row.settled)
        .column("almost_settled", "almost converged after (tokens)", |row| {
            row.almost_settled
        })
        .write(out, format)
}

/// Distinct experts of a batch: measured, if tokens were independent, and of a uniform router.
#[derive(Clone, Copy)]
struct Batch {
    layer: Option<u32>,
    n_tokens: u64,
    distinct: [f64; 3],
}

fn batches(out: &mut dyn Write, format: Format, args: &Args, counted: &Counted) -> io::Result<()> {
    let Counted {
        hotness, survey, ..
    } = counted;
    let mut rows: Vec<Batch> = Vec::new();
    for layer in survey.layers() {
        let counts = hotness.counts(layer, args.phases());
        let means = survey.distinct(layer).into_iter().flat_map(|d| d.means());
        rows.extend(means.map(|(n_tokens, measured)| {
            let independent = distinct_if_independent(&counts, survey.rows(layer), n_tokens);
            let uniform =
                distinct_if_uniform(hotness.n_expert(), hotness.n_expert_used(), n_tokens);
            Batch {
                layer: Some(layer),
                n_tokens,
                distinct: [measured, independent, uniform],
            }
        }));
    }
    let mut sizes: Vec<u64> = rows.iter().map(|row| row.n_tokens).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let means = sizes.into_iter().map(|n_tokens| {
        let of_size = rows.iter().filter(|row| row.n_tokens == n_tokens);
        let n = of_size.clone().count() as f64;
        let mean = |at: usize| of_size.clone().map(|row| row.distinct[at]).sum::<f64>() / n;
        Batch {
            layer: None,
            n_tokens,
            distinct: [mean(0), mean(1), mean(2)],
        }
    });
    let means: Vec<Batch> = means.collect();
    Table::of(rows.iter().chain(&means))
        .column("layer_id", "layer", move |row| {
            layer_cell(row.layer, format)
        })
        .column("batch", "batch (tokens)", |row| row.n_tokens)
        .column("distinct", "distinct experts", |row| row.distinct[0])
        .column("if_independent", "if independent", |row| row.distinct[1])
        .column("if_even", "uniform router", |row| row.distinct[2])
        .write(out, format)
}

/// How a layer's experts belong to a domain.
struct Domain<'a> {
    layer: u32,
    label: &'a str,
    rows: u64,
    /// Of the layer.
    information_bits: f64,
    /// From all other domains.
    total_variation: Option<f64>,
    favourite: Option<Specialisation>,
    /// Share of the tokens that an expert of a uniform router has.
    uniform: f64,
}

fn domains(out: &mut dyn Write, format: Format, args: &Args, counted: &Counted) -> io::Result<()> {
    let Counted {
        hotness, survey, ..
    } = counted;
    let groups = survey.labels();
    let mut rows = Vec::new();
    for layer in hotness.layers(args.phases()) {
        let counts: Vec<Vec<u64>> = (0..groups.names().len())
            .map(|group| groups.counts(group, layer))
            .collect();
        let slices: Vec<&[u64]> = counts.iter().map(Vec::as_slice).collect();
        let information_bits = mutual_information(&slices);
        for (group, label) in groups.names().iter().enumerate() {
            let mut others = vec![0u64; hotness.n_expert() as usize];
            let other_counts = counts.iter().enumerate().filter(|(at, _)| *at != group);
            for (sum, count) in other_counts.flat_map(|(_, counts)| counts.iter().enumerate()) {
                if let Some(sum) = others.get_mut(sum) {
                    *sum = sum.saturating_add(*count);
                }
            }
            let n_rows = match groups.rows(group, layer) {
                0 => rows_of_counts(&counts[group], hotness.n_expert_used()),
                rows => rows,
            };
            rows.push(Domain {
                layer,
                label,
                rows: n_rows,
                information_bits,
                total_variation: total_variation(&counts[group], &others),
                favourite: specialisation(&counts[group], n_rows),
                uniform: f64::from(hotness.n_expert_used()) / f64::from(hotness.n_expert().max(1)),
            });
        }
    }
    Table::of(&rows)
        .column("layer_id", "layer", |row| row.layer)
        .column("label", "domain", |row| row.label)
        .column("rows", "tokens", |row| row.rows)
        .column("information_bits", "mutual information (bits)", |row| {
            row.information_bits
        })
        .column("total_variation", "total variation", |row| {
            row.total_variation
        })
        .column("expert_id", "most used expert", |row| {
            Some(row.favourite?.expert)
        })
        .column("specialisation", "its share of tokens", |row| {
            Some(row.favourite?.share_of_tokens)
        })
        .column("over_even", "times a uniform router's", |row| {
            Some(row.favourite?.share_of_tokens / row.uniform)
        })
        .write(out, format)
}

/// Tokens behind counts, where they are not told.
fn rows_of_counts(counts: &[u64], n_expert_used: u32) -> u64 {
    let choices = counts
        .iter()
        .fold(0u64, |sum, &count| sum.saturating_add(count));
    LayerCounts::tokens_of(choices, n_expert_used.max(1))
}

fn bootstrap(
    out: &mut dyn Write,
    format: Format,
    args: &Args,
    counted: &Counted,
) -> io::Result<()> {
    let n_expert = counted.hotness.n_expert();
    let n = args.resamples as usize;
    let intervals = stability::bootstrap(&counted.survey, n_expert, n, args.seed);
    Table::of(&intervals)
        .column("measure", "measure", |row| row.measure.as_str())
        .column("value", "value", |row| row.value)
        .column("low", "95 % interval, low", |row| row.low)
        .column("high", "high", |row| row.high)
        .write(out, format)
}
