//! What was measured, as rows of named columns.

use std::collections::BTreeMap;
use std::time::Duration;

use moe_executor::recorder::LaneCounts;
use moe_executor::replay::Ran;
use moe_trace::record::{PHASE_PROMPT, lane};

use crate::output::Cell;

/// Names of the columns; those of the lanes are how many experts were computed where, by the down product.
pub const COLUMNS: [&str; 17] = [
    "phase",
    "layer_id",
    "batches",
    "tokens",
    "us_per_token",
    "bytes",
    "gb_per_s",
    "bandwidth_gb_per_s",
    "bandwidth_share",
    "tokens_per_s",
    lane::NAMES[lane::CPU as usize],
    lane::NAMES[lane::GPU_RESIDENT as usize],
    lane::NAMES[lane::HOT_CACHE as usize],
    lane::NAMES[lane::POST_FETCHED as usize],
    lane::NAMES[lane::POST_FETCH_MISS as usize],
    lane::NAMES[lane::CACHE_HIT as usize],
    lane::NAMES[lane::CACHE_MISS as usize],
];

/// Bytes that memories read in a second.
pub struct Bandwidths {
    /// The host's.
    pub host: f64,
    /// The GPU's, where there is one.
    pub gpu: Option<f64>,
}

/// Sums of all repetitions.
#[derive(Debug, Default)]
pub struct ReplayReport {
    /// By phase and layer.
    layers: BTreeMap<(u8, u16), Sums>,
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
    pub fn add(&mut self, phase: u8, ran: &[Ran]) {
        for ran in ran {
            let sums = self.layers.entry((phase, ran.layer)).or_default();
            sums.batches += 1;
            sums.tokens += ran.n_tokens as u64;
            sums.time += ran.time;
            sums.bytes += ran.bytes;
            add(&mut sums.lanes, &ran.lanes);
        }
    }

    /// A row a layer, then one without a layer for all of them; prompt before generated tokens. Counts are those of one of the
    /// repetitions.
    pub fn rows(&self, repetitions: u32, bandwidths: &Bandwidths) -> Vec<Vec<Cell<'static>>> {
        let mut rows = Vec::new();
        let mut all = BTreeMap::<u8, Sums>::new();
        for (&(phase, _), layer) in &self.layers {
            let all = all.entry(phase).or_default();
            // The last layer may have fewer tokens than the prompt.
            all.batches = all.batches.max(layer.batches);
            all.tokens = all.tokens.max(layer.tokens);
            all.time += layer.time;
            all.bytes += layer.bytes;
            add(&mut all.lanes, &layer.lanes);
        }
        for (phase, all) in all {
            let layers = self.layers.range((phase, 0)..=(phase, u16::MAX));
            let layers = layers.map(|(&(_, layer), sums)| (Some(layer), *sums));
            let phase = match phase {
                PHASE_PROMPT => "prompt",
                _ => "generate",
            };
            rows.extend(layers.chain([(None, all)]).map(|(layer, sums)| {
                let mut row = vec![phase.into(), layer.into()];
                row.extend(sums.cells(layer.is_none(), repetitions.into(), bandwidths));
                row
            }));
        }
        rows
    }
}

impl Sums {
    /// From `batches` on; tokens a second only for all layers.
    fn cells(&self, is_all: bool, repetitions: u64, bandwidths: &Bandwidths) -> Vec<Cell<'static>> {
        let seconds = self.time.as_secs_f64();
        let rate = |n: u64| Some(n as f64 / seconds).filter(|rate| rate.is_finite());
        // Where several take part there is no one bandwidth to hold it against.
        let alone = |lane: u8| {
            let mut others = self.lanes.iter().enumerate();
            others.all(|(at, &n)| n == 0 || at == usize::from(lane))
        };
        let bandwidth = match () {
            () if alone(lane::CPU) => Some(bandwidths.host),
            () if alone(lane::GPU_RESIDENT) => bandwidths.gpu,
            () => None,
        };
        let read = rate(self.bytes);
        let mut cells: Vec<Cell> = vec![
            (self.batches / repetitions).into(),
            (self.tokens / repetitions).into(),
            rate(self.tokens).map(|rate| 1e6 / rate).into(),
            (self.bytes / repetitions).into(),
            read.map(|read| read / 1e9).into(),
            bandwidth.map(|bandwidth| bandwidth / 1e9).into(),
            read.zip(bandwidth).map(|(read, most)| read / most).into(),
            rate(self.tokens).filter(|_| is_all).into(),
        ];
        let lanes = self.lanes.iter().skip(1);
        cells.extend(lanes.map(|n| Cell::from(n / repetitions)));
        cells
    }
}

fn add(to: &mut LaneCounts, counts: &LaneCounts) {
    to.iter_mut().zip(counts).for_each(|(to, n)| *to += n);
}
