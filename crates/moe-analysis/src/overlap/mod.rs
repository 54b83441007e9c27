//! Overlap of Post-Fetch's expert transfers with the computation of gate and up.
//!
//! Post-Fetch ([ernestuz-b/llama-prefetch.cpp](https://github.com/ernestuz-b/llama-prefetch.cpp)) copies the down matrices
//! of the selected experts of a layer to the GPU while the CPU computes gate and up. The computation is the *window* in
//! which the transfer can be hidden. The GPU waits for the part of the transfer after the window.
//!
//! Two bounds accompany the measurements. At most the length of the window can be hidden. And if the memory bandwidth is
//! saturated, the transfer slows down gate and up, because both read the same memory.

mod memory;
mod passes;
mod stats;
mod verdict;

use std::collections::BTreeMap;

use moe_trace::transfers::Transfer;
use moe_trace::{LayerId, Phase};

pub use memory::{MemoryTraffic, gate_up_bytes};
pub use passes::{bounds, median_pass, passes};
pub use stats::{DurationStats, OverlapStats};
pub use verdict::OverlapVerdict;

use stats::Collector;

/// Overlap of transfers and computation in one phase.
#[derive(Clone, Debug, PartialEq)]
pub struct OverlapReport {
    /// Number of passes.
    pub passes: u64,
    /// Statistics of each layer.
    pub layers: BTreeMap<LayerId, OverlapStats>,
    /// Statistics of all layers together.
    pub all: OverlapStats,
}

/// Analyzes the transfers of a phase; `None` without transfers.
pub fn report(
    transfers: &[Transfer],
    phase: Phase,
    memory: &MemoryTraffic,
) -> Option<OverlapReport> {
    let mut layers: BTreeMap<LayerId, Collector> = BTreeMap::new();
    let mut all = Collector::default();
    for transfer in transfers.iter().filter(|transfer| transfer.phase == phase) {
        let gate_up_bytes = memory.gate_up_bytes_of(transfer);
        let layer = layers.entry(transfer.layer_id).or_default();
        layer.add(transfer, gate_up_bytes);
        all.add(transfer, gate_up_bytes);
    }
    let of_phase = |pass: &&&[Transfer]| pass.first().is_some_and(|t| t.phase == phase);
    let finish = |collector: Collector| collector.finish(memory.memory_bytes_per_s);
    (!layers.is_empty()).then(|| OverlapReport {
        passes: passes(transfers).iter().filter(of_phase).count() as u64,
        layers: layers
            .into_iter()
            .map(|(layer, collector)| (layer, finish(collector)))
            .collect(),
        all: finish(all),
    })
}
