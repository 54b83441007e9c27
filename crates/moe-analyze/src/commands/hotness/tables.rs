//! The tables of `--table`. Each has at most a few rows per layer, independent of the length of the trace.

use std::io::{self, Write};

use moe_analysis::measures::{LoadBalance, distinct_if_independent, distinct_if_uniform};
use moe_analysis::survey::{Survey, TokenPairs};
use moe_trace::LayerId;

use super::args::{Args, TableChoice};
use crate::counting::inputs::Counted;
use crate::output::{Format, Table, or_all};

/// Writes the rows of a table.
pub fn write(
    out: &mut dyn Write,
    format: Format,
    table: TableChoice,
    args: &Args,
    counted: &Counted,
) -> io::Result<()> {
    match table {
        TableChoice::Matrix | TableChoice::Measures => measures(out, format, args, counted),
        TableChoice::Overall => overall(out, format, args, counted),
        TableChoice::Batches => batches(out, format, args, counted),
    }
}

/// A layer, or all layers together.
struct Layer {
    /// `None`: all layers.
    layer: Option<LayerId>,
    rows: u64,
    load_balance: LoadBalance,
    /// `None` if only counts are known.
    order: Option<TokenPairs>,
}

/// A measure of a layer: name, header, value.
type Measure = (&'static str, &'static str, fn(&Layer) -> Option<f64>);

const MEASURES: [Measure; 14] = [
    ("active", "active experts", |layer| {
        Some(layer.load_balance.n_active as f64)
    }),
    ("active_fraction", "active experts (fraction)", |layer| {
        Some(layer.load_balance.active_fraction())
    }),
    ("top_1", "coverage of top 1 % (fraction)", |layer| {
        Some(layer.load_balance.share_top[0])
    }),
    ("top_5", "coverage of top 5 % (fraction)", |layer| {
        Some(layer.load_balance.share_top[1])
    }),
    ("top_10", "coverage of top 10 % (fraction)", |layer| {
        Some(layer.load_balance.share_top[2])
    }),
    ("top_25", "coverage of top 25 % (fraction)", |layer| {
        Some(layer.load_balance.share_top[3])
    }),
    ("top_50", "coverage of top 50 % (fraction)", |layer| {
        Some(layer.load_balance.share_top[4])
    }),
    ("gini", "Gini coefficient", |layer| {
        Some(layer.load_balance.gini)
    }),
    ("entropy", "entropy (0..1)", |layer| {
        Some(layer.load_balance.entropy)
    }),
    ("max_over_mean", "max/mean (×)", |layer| {
        Some(layer.load_balance.max_over_mean)
    }),
    ("effective", "effective experts", |layer| {
        Some(layer.load_balance.effective)
    }),
    ("overlap", "overlap of consecutive tokens", |layer| {
        layer.order.as_ref()?.overlap()
    }),
    ("repeat_first", "same first expert", |layer| {
        layer.order.as_ref()?.repeat_first()
    }),
    ("repeat_first_two", "common expert in first two", |layer| {
        layer.order.as_ref()?.repeat_first_two()
    }),
];

/// Returns every layer, and all layers together.
fn measured(args: &Args, counted: &Counted) -> (Vec<Layer>, Layer) {
    let (hotness, survey) = (&counted.hotness, &counted.survey);
    let layers = hotness.summary(args.phases(), 0).into_iter();
    let layers = layers.map(|layer| Layer {
        layer: Some(layer.layer),
        rows: layer.tokens,
        load_balance: layer.load_balance,
        order: survey.order(layer.layer).cloned(),
    });
    let all = Layer {
        layer: None,
        rows: hotness.tokens(args.phases()),
        load_balance: hotness.overall(args.phases()),
        order: Some(order_of_all(survey)),
    };
    (layers.collect(), all)
}

/// Returns the pairs of consecutive tokens of all layers.
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
        .column("layer_id", "layer", move |row| or_all(row.layer, format))
        .column("rows", "tokens", |row| (row.rows > 0).then_some(row.rows))
        .column("activations", "activations", |row| {
            row.load_balance.n_selections
        })
        .column("active", "active experts", |row| row.load_balance.n_active);
    // The number of active experts is printed as an integer, above.
    for (name, header, value) in MEASURES.into_iter().skip(1) {
        table = table.column(name, header, move |row| value(row));
    }
    table.write(out, format)
}

/// Statistics of a measure over all layers.
struct Overall {
    measure: &'static str,
    model: Option<f64>,
    layer_mean: Option<f64>,
    /// Layer and value.
    least: Option<(LayerId, f64)>,
    most: Option<(LayerId, f64)>,
}

impl Overall {
    fn of((measure, _, value): Measure, layers: &[Layer], all: &Layer) -> Overall {
        let known = layers.iter();
        let known = known.filter_map(|layer| Some((layer.layer?, value(layer)?)));
        let known: Vec<(LayerId, f64)> = known.collect();
        let sum: f64 = known.iter().map(|(_, value)| value).sum();
        let values = known.iter().copied();
        Overall {
            measure,
            model: value(all),
            layer_mean: (!known.is_empty()).then(|| sum / known.len() as f64),
            // The first of equal layers.
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
        .column("model", "entire model", |row| row.model)
        .column("layer_mean", "mean of layers", |row| row.layer_mean)
        .column("least", "min of layers", |row| {
            row.least.map(|(_, value)| value)
        })
        .column("least_layer", "layer of min", |row| {
            row.least.map(|(layer, _)| layer)
        })
        .column("most", "max of layers", |row| {
            row.most.map(|(_, value)| value)
        })
        .column("most_layer", "layer of max", |row| {
            row.most.map(|(layer, _)| layer)
        })
        .write(out, format)
}

/// Mean number of distinct experts in batches of one size.
#[derive(Clone, Copy)]
struct Batch {
    layer: Option<LayerId>,
    n_tokens: u64,
    /// Measured, expected for independent tokens, expected for a uniform router.
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
            let independent =
                distinct_if_independent(&counts, survey.routed_tokens(layer), n_tokens);
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
        .column("layer_id", "layer", move |row| or_all(row.layer, format))
        .column("batch", "batch (tokens)", |row| row.n_tokens)
        .column("distinct", "distinct experts, mean", |row| row.distinct[0])
        .column("if_independent", "expected, independent tokens", |row| {
            row.distinct[1]
        })
        .column("if_uniform", "expected, uniform router", |row| {
            row.distinct[2]
        })
        .write(out, format)
}
