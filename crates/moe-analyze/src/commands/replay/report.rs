//! The table of measurements.

use std::collections::BTreeMap;
use std::slice;
use std::time::Duration;

use moe_executor::recorder::LaneCounts;
use moe_executor::replay::Ran;
use moe_trace::record::lane;
use moe_trace::{LayerId, Phase};

use crate::output::Table;

/// Headers of the numbers of experts by lane, in the order of [`lane::NAMES`].
const LANE_HEADERS: [&str; lane::NAMES.len()] = [
    "unknown (experts)",
    "cpu (experts)",
    "gpu_resident (experts)",
    "hot_cache (experts)",
    "post_fetched (experts)",
    "post_fetch_miss (experts)",
    "cache_hit (experts)",
    "cache_miss (experts)",
];

/// Measured memory bandwidths, bytes/s.
pub struct Bandwidths {
    /// CPU memory.
    pub host: f64,
    /// Memory of the first GPU.
    pub gpu: Option<f64>,
}

/// Sums over all repetitions.
#[derive(Debug, Default)]
pub struct ReplayReport {
    /// By phase and layer.
    layers: BTreeMap<(Phase, LayerId), Sums>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    batches: u64,
    tokens: u64,
    time: Duration,
    bytes: u64,
    lanes: LaneCounts,
}

impl ReplayReport {
    /// Adds the layers of a pass.
    pub fn add(&mut self, phase: Phase, ran: &[Ran]) {
        for ran in ran {
            let sums = self.layers.entry((phase, ran.layer)).or_default();
            sums.batches += 1;
            sums.tokens += ran.n_tokens as u64;
            sums.time += ran.time;
            sums.bytes += ran.bytes;
            add(&mut sums.lanes, &ran.lanes);
        }
    }

    /// Returns one row per layer, then a row without a layer for all layers, for each phase.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        let mut all = BTreeMap::<Phase, Sums>::new();
        for (&(phase, _), layer) in &self.layers {
            let all = all.entry(phase).or_default();
            // The last layer can compute fewer tokens than the prompt has.
            all.batches = all.batches.max(layer.batches);
            all.tokens = all.tokens.max(layer.tokens);
            all.time += layer.time;
            all.bytes += layer.bytes;
            add(&mut all.lanes, &layer.lanes);
        }
        for (phase, all) in all {
            let layers = self
                .layers
                .range((phase, LayerId(0))..=(phase, LayerId(u16::MAX)));
            let layers = layers.map(|(&(_, layer), sums)| (Some(layer), *sums));
            rows.extend(layers.chain([(None, all)]).map(|(layer, sums)| Row {
                phase,
                layer,
                sums,
            }));
        }
        rows
    }
}

/// Measurements of a layer, or of all layers, in a phase.
pub struct Row {
    phase: Phase,
    /// `None`: all layers.
    layer: Option<LayerId>,
    sums: Sums,
}

impl Row {
    /// Returns `n` per second of the row's time.
    fn rate(&self, n: u64) -> Option<f64> {
        let rate = n as f64 / self.sums.time.as_secs_f64();
        rate.is_finite().then_some(rate)
    }

    /// Returns the bandwidth of the memory that contains all computed experts, or `None` if they are in several memories.
    fn bandwidth(&self, bandwidths: &Bandwidths) -> Option<f64> {
        let alone = |lane: u8| {
            let mut others = self.sums.lanes.iter().enumerate();
            others.all(|(at, &n)| n == 0 || at == usize::from(lane))
        };
        match () {
            () if alone(lane::CPU) => Some(bandwidths.host),
            () if alone(lane::GPU_RESIDENT) => bandwidths.gpu,
            () => None,
        }
    }
}

/// Returns the table of the rows. Counts are per repetition. The counts of lanes are the numbers of experts whose down product each
/// device computed. Tokens per second are for all layers together.
pub fn table<'a>(
    rows: &'a [Row],
    repetitions: u32,
    bandwidths: &'a Bandwidths,
) -> Table<'a, slice::Iter<'a, Row>> {
    let repetitions = u64::from(repetitions);
    let mut table = Table::of(rows)
        .column("phase", "phase", |row| match row.phase {
            Phase::Prompt => "prompt",
            Phase::Generate => "generate",
        })
        .column("layer_id", "layer", |row| row.layer)
        .column("batches", "batches", move |row| {
            row.sums.batches / repetitions
        })
        .column("tokens", "tokens", move |row| row.sums.tokens / repetitions)
        .column("us_per_token", "time/token (µs)", |row| {
            row.rate(row.sums.tokens).map(|rate| 1e6 / rate)
        })
        .column("bytes", "read (bytes)", move |row| {
            row.sums.bytes / repetitions
        })
        .column("gb_per_s", "read (GB/s)", |row| {
            row.rate(row.sums.bytes).map(|read| read / 1e9)
        })
        .column("bandwidth_gb_per_s", "memory bandwidth (GB/s)", |row| {
            row.bandwidth(bandwidths).map(|bandwidth| bandwidth / 1e9)
        })
        .column("bandwidth_share", "bandwidth used (fraction)", |row| {
            Some(row.rate(row.sums.bytes)? / row.bandwidth(bandwidths)?)
        })
        .column("tokens_per_s", "tokens/s", |row| {
            row.rate(row.sums.tokens).filter(|_| row.layer.is_none())
        });
    for (lane, name) in lane::NAMES.into_iter().enumerate().skip(1) {
        table = table.column(name, LANE_HEADERS[lane], move |row| {
            row.sums.lanes[lane] / repetitions
        });
    }
    table
}

fn add(to: &mut LaneCounts, counts: &LaneCounts) {
    to.iter_mut().zip(counts).for_each(|(to, n)| *to += n);
}
