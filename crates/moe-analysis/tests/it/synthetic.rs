//! Synthetic traces and their batches.

use moe_analysis::simulate::{Batches, Collector};
use moe_placement::plan::ExpertSizes;
use moe_trace::{ExpertId, LayerId, Phase, RoutingRow, Sink};
use proptest::prelude::*;

pub const N_LAYER: u16 = 3;
pub const N_EXPERT: u32 = 8;

/// A batch: layer, phase, and the selected experts of its tokens.
pub type SyntheticBatch = (u16, Phase, Vec<u32>);

/// Collects batches. Experts have the sizes `bytes(layer, expert)`.
pub fn batches_of(
    made: &[SyntheticBatch],
    n_layer: u16,
    n_expert: u32,
    bytes: impl Fn(u16, u32) -> u64,
) -> Batches {
    let mut collector = Collector::new();
    for ((layer_id, phase, experts), time) in made.iter().zip(1..) {
        for &expert_id in experts {
            let row = RoutingRow {
                expert_id: ExpertId(expert_id),
                phase: Some(*phase),
                timestamp_ns: Some(time),
                ..RoutingRow::at_layer(LayerId(*layer_id))
            };
            collector.routing(&row).unwrap();
        }
    }
    let keys = (0..n_layer).flat_map(|layer| (0..n_expert).map(move |expert| (layer, expert)));
    let sizes: ExpertSizes = keys
        .map(|(l, e)| (LayerId(l), ExpertId(e), bytes(l, e)))
        .collect();
    collector.finish(&sizes).unwrap()
}

/// Up to 119 batches of up to `max_selections` selections, in [`N_LAYER`] layers with [`N_EXPERT`] experts.
pub fn traces(max_selections: usize) -> impl Strategy<Value = Vec<SyntheticBatch>> {
    let experts = prop::collection::vec(0..N_EXPERT, 1..=max_selections);
    let phase = prop::bool::ANY.prop_map(|is_prompt| {
        if is_prompt {
            Phase::Prompt
        } else {
            Phase::Generate
        }
    });
    prop::collection::vec((0..N_LAYER, phase, experts), 1..120)
}
