//! How much of Post-Fetch's transfers lay under the computation of gate and up, and how much could have.
//!
//! In a layer of a pass the down matrices of the chosen experts travel to the GPU while the host computes gate and up: the
//! transfer hides in that window, and what lies outside of it is waited for. Two bounds stand beside what was measured. A
//! transfer can hide only as far as the window is as long as it. And a window whose memory is busy has no room: the
//! transfer reads the same memory, so what it gains gate and up lose.

mod figures;
mod passes;
mod reads;
mod verdict;

use std::collections::BTreeMap;

use moe_trace::transfers::Transfer;
use moe_trace::{LayerId, Phase};

pub use figures::{Figures, Times};
pub use passes::{bounds, passes, typical};
pub use reads::{Reads, gate_up_bytes};
pub use verdict::OverlapVerdict;

use figures::Collector;

/// The figures of one phase.
#[derive(Clone, Debug, PartialEq)]
pub struct OverlapReport {
    /// Number of passes.
    pub passes: u64,
    /// Of each layer, by its number.
    pub layers: BTreeMap<LayerId, Figures>,
    /// Of all layers together.
    pub all: Figures,
}

/// The figures of a phase; `None` if it has no transfers.
pub fn report(transfers: &[Transfer], phase: Phase, reads: &Reads) -> Option<OverlapReport> {
    let mut layers: BTreeMap<LayerId, Collector> = BTreeMap::new();
    let mut all = Collector::default();
    for transfer in transfers.iter().filter(|transfer| transfer.phase == phase) {
        let gate_up_bytes = reads.of(transfer);
        let layer = layers.entry(transfer.layer_id).or_default();
        layer.add(transfer, gate_up_bytes);
        all.add(transfer, gate_up_bytes);
    }
    let of_phase = |pass: &&&[Transfer]| pass.first().is_some_and(|t| t.phase == phase);
    let finish = |collector: Collector| collector.finish(reads.memory_bytes_per_s);
    (!layers.is_empty()).then(|| OverlapReport {
        passes: passes(transfers).iter().filter(of_phase).count() as u64,
        layers: layers
            .into_iter()
            .map(|(layer, collector)| (layer, finish(collector)))
            .collect(),
        all: finish(all),
    })
}
