//! The rows of `--table`. None has more than a few rows for each layer, whatever the length of the trace.

use std::io::Write;

use moe_analysis::measures::{
    Spread, distinct_if_independent, distinct_if_uniform, mutual_information, specialisation,
    total_variation,
};
use moe_analysis::stability::{self, split_by_group, split_by_time};
use moe_analysis::survey::{Survey, TokenPairs};
use moe_placement::learn::LayerCounts;

use super::args::{Args, Split, TableChoice};
use super::input::Counted;
use crate::output::{Cell, Format, write_rows};

type Row = Vec<Cell<'static>>;

/// Columns and rows.
pub struct Table {
    columns: Vec<&'static str>,
    rows: Vec<Row>,
}

impl Table {
    pub fn write(&self, out: &mut dyn Write, format: Format) -> std::io::Result<()> {
        write_rows(out, format, &self.columns, self.rows.iter().cloned())
    }
}

/// The table that the user asked for.
pub fn table(
    args: &Args,
    counted: &Counted,
    choice: TableChoice,
    format: Format,
) -> anyhow::Result<Table> {
    Ok(match choice {
        TableChoice::Matrix | TableChoice::Measures => measures(args, counted, format),
        TableChoice::Overall => overall(args, counted),
        TableChoice::Split => split(args, counted)?,
        TableChoice::Drift => drift(counted, format),
        TableChoice::Settling => settling(counted),
        TableChoice::Batches => batches(args, counted, format),
        TableChoice::Domains => domains(args, counted),
        TableChoice::Bootstrap => bootstrap(args, counted),
    })
}

/// A layer's number; of the whole model `all` for a person, null for a program.
fn layer_cell(layer: Option<u32>, format: Format) -> Cell<'static> {
    match (layer, format) {
        (None, Format::Table | Format::Md) => "all".into(),
        (layer, _) => layer.into(),
    }
}

/// Names of the measures of [`figures`].
const FIGURES: [&str; 14] = [
    "active",
    "active_fraction",
    "top_1",
    "top_5",
    "top_10",
    "top_25",
    "top_50",
    "gini",
    "entropy",
    "max_over_mean",
    "effective",
    "overlap",
    "repeat_first",
    "repeat_first_two",
];

/// Spread and order; those of the order are not told by counts.
fn figures(spread: &Spread, order: Option<&TokenPairs>) -> [Option<f64>; FIGURES.len()] {
    let [top_1, top_5, top_10, top_25, top_50] = spread.share_top;
    [
        Some(spread.n_active as f64),
        Some(spread.active_fraction()),
        Some(top_1),
        Some(top_5),
        Some(top_10),
        Some(top_25),
        Some(top_50),
        Some(spread.gini),
        Some(spread.entropy),
        Some(spread.max_over_mean),
        Some(spread.effective),
        order.and_then(TokenPairs::overlap),
        order.and_then(TokenPairs::repeat_first),
        order.and_then(TokenPairs::repeat_first_two),
    ]
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

fn measures(args: &Args, counted: &Counted, format: Format) -> Table {
    let Counted {
        hotness, survey, ..
    } = counted;
    let phases = args.phases();
    let row = |layer: Option<u32>, rows: u64, spread: &Spread, order: Option<&TokenPairs>| {
        let mut cells = vec![
            layer_cell(layer, format),
            Some(rows).filter(|&rows| rows > 0).into(),
            spread.choices.into(),
            (spread.n_active as u64).into(),
        ];
        // The number of active experts is there already, whole.
        let figures = figures(spread, order).into_iter().skip(1);
        cells.extend(figures.map(Cell::from));
        cells
    };
    let layers = hotness.summary(phases, 0).into_iter();
    let mut rows: Vec<Row> = layers
        .map(|l| row(Some(l.layer), l.rows, &l.spread, survey.order(l.layer)))
        .collect();
    let all = order_of_all(survey);
    rows.push(row(
        None,
        hotness.tokens(phases),
        &hotness.overall(phases),
        Some(&all),
    ));
    let columns = ["layer_id", "rows", "choices"].into_iter().chain(FIGURES);
    Table {
        columns: columns.collect(),
        rows,
    }
}

fn overall(args: &Args, counted: &Counted) -> Table {
    let Counted {
        hotness, survey, ..
    } = counted;
    let whole = figures(&hotness.overall(args.phases()), Some(&order_of_all(survey)));
    let layers = hotness.summary(args.phases(), 0).into_iter();
    let layers: Vec<_> = layers
        .map(|l| (l.layer, figures(&l.spread, survey.order(l.layer))))
        .collect();
    let rows = FIGURES.into_iter().zip(whole).enumerate();
    let rows = rows.map(|(at, (name, whole))| {
        let known = layers
            .iter()
            .filter_map(|(layer, all)| Some((*layer, all[at]?)));
        let known: Vec<(u32, f64)> = known.collect();
        let sum: f64 = known.iter().map(|(_, value)| value).sum();
        let mean = (!known.is_empty()).then(|| sum / known.len() as f64);
        // Of equal ones the lower layer.
        let least = known
            .iter()
            .copied()
            .reduce(|a, b| if b.1 < a.1 { b } else { a });
        let most = known
            .iter()
            .copied()
            .reduce(|a, b| if b.1 > a.1 { b } else { a });
        vec![
            name.into(),
            whole.into(),
            mean.into(),
            least.map(|(_, value)| value).into(),
            least.map(|(layer, _)| layer).into(),
            most.map(|(_, value)| value).into(),
            most.map(|(layer, _)| layer).into(),
        ]
    });
    Table {
        columns: vec![
            "measure",
            "model",
            "layer_mean",
            "least",
            "least_layer",
            "most",
            "most_layer",
        ],
        rows: rows.collect(),
    }
}

/// What was learned on one part, tested on another.
pub fn split(args: &Args, counted: &Counted) -> anyhow::Result<Table> {
    let Counted {
        hotness, survey, ..
    } = counted;
    let layers = hotness.layers(args.phases());
    let n_expert = hotness.n_expert();
    let splits = match args.split.unwrap_or(Split::Time(0.5)) {
        Split::Time(fraction) => Vec::from_iter(split_by_time(survey, n_expert, fraction)),
        Split::BySequence => split_by_group(survey.folds(), &layers, n_expert, "sequence")?,
        Split::ByLabel => split_by_group(survey.labels(), &layers, n_expert, "label")?,
    };
    let rows = splits.iter().flat_map(|split| {
        split.coverage.iter().map(|coverage| {
            vec![
                split.tested.clone().into(),
                split.rows_learned.into(),
                split.rows_tested.into(),
                (coverage.percent as u64).into(),
                coverage.in_sample.into(),
                coverage.out_of_sample.into(),
                coverage.uniform.into(),
            ]
        })
    });
    Ok(Table {
        columns: vec![
            "tested",
            "rows_learned",
            "rows_tested",
            "percent",
            "in_sample",
            "out_of_sample",
            "uniform",
        ],
        rows: rows.collect(),
    })
}

fn drift(counted: &Counted, format: Format) -> Table {
    let rows = stability::drift(&counted.survey, counted.hotness.n_expert());
    let rows = rows.into_iter().map(|row| {
        vec![
            layer_cell(row.layer, format),
            (row.from as u64).into(),
            (row.to as u64).into(),
            row.rows.into(),
            row.total_variation.into(),
            row.noise.into(),
            row.jaccard.into(),
        ]
    });
    Table {
        columns: vec![
            "layer_id",
            "from",
            "to",
            "rows",
            "total_variation",
            "noise",
            "jaccard",
        ],
        rows: rows.collect(),
    }
}

fn settling(counted: &Counted) -> Table {
    let rows = stability::settling(&counted.survey, counted.hotness.n_expert());
    let rows = rows.into_iter().map(|row| {
        vec![
            row.layer.into(),
            row.rows.into(),
            row.settled.into(),
            row.almost_settled.into(),
        ]
    });
    Table {
        columns: vec!["layer_id", "rows", "settled", "almost_settled"],
        rows: rows.collect(),
    }
}

fn batches(args: &Args, counted: &Counted, format: Format) -> Table {
    let Counted {
        hotness, survey, ..
    } = counted;
    let layers = survey.layers();
    let mut rows: Vec<(Option<u32>, u64, [f64; 3])> = Vec::new();
    for &layer in &layers {
        let counts = hotness.counts(layer, args.phases());
        let means = survey.distinct(layer).into_iter().flat_map(|d| d.means());
        rows.extend(means.map(|(batch, measured)| {
            let independent = distinct_if_independent(&counts, survey.rows(layer), batch);
            let even = distinct_if_uniform(hotness.n_expert(), hotness.n_expert_used(), batch);
            (Some(layer), batch, [measured, independent, even])
        }));
    }
    let mut sizes: Vec<u64> = rows.iter().map(|(_, batch, _)| *batch).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let means = sizes.into_iter().map(|size| {
        let of_size = rows.iter().filter(|(_, batch, _)| *batch == size);
        let n = of_size.clone().count() as f64;
        let mean = |at: usize| of_size.clone().map(|(_, _, all)| all[at]).sum::<f64>() / n;
        (None, size, [mean(0), mean(1), mean(2)])
    });
    let means: Vec<_> = means.collect();
    let rows = rows.into_iter().chain(means);
    let rows = rows.map(|(layer, batch, [measured, independent, even])| {
        vec![
            layer_cell(layer, format),
            batch.into(),
            measured.into(),
            independent.into(),
            even.into(),
        ]
    });
    Table {
        columns: vec!["layer_id", "batch", "distinct", "if_independent", "if_even"],
        rows: rows.collect(),
    }
}

fn domains(args: &Args, counted: &Counted) -> Table {
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
        let information = mutual_information(&slices);
        for (group, name) in groups.names().iter().enumerate() {
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
            let favourite = specialisation(&counts[group], n_rows);
            let even = f64::from(hotness.n_expert_used()) / f64::from(hotness.n_expert().max(1));
            rows.push(vec![
                layer.into(),
                name.clone().into(),
                n_rows.into(),
                information.into(),
                total_variation(&counts[group], &others).into(),
                favourite.map(|f| f.expert as u64).into(),
                favourite.map(|f| f.share_of_tokens).into(),
                favourite.map(|f| f.share_of_tokens / even).into(),
            ]);
        }
    }
    Table {
        columns: vec![
            "layer_id",
            "label",
            "rows",
            "information_bits",
            "total_variation",
            "expert_id",
            "specialisation",
            "over_even",
        ],
        rows,
    }
}

/// Tokens behind counts, where they are not told.
fn rows_of_counts(counts: &[u64], n_expert_used: u32) -> u64 {
    let choices = counts
        .iter()
        .fold(0u64, |sum, &count| sum.saturating_add(count));
    LayerCounts::tokens_of(choices, n_expert_used.max(1))
}

fn bootstrap(args: &Args, counted: &Counted) -> Table {
    let n_expert = counted.hotness.n_expert();
    let n = args.resamples as usize;
    let intervals = stability::bootstrap(&counted.survey, n_expert, n, args.seed);
    let rows = intervals.into_iter().map(|interval| {
        vec![
            interval.measure.into(),
            interval.value.into(),
            interval.low.into(),
            interval.high.into(),
        ]
    });
    Table {
        columns: vec!["measure", "value", "low", "high"],
        rows: rows.collect(),
    }
}
