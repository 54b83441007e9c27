//! The routing decisions of a layer, and the lanes that compute the selected experts.

use moe_trace::ExpertId;
use moe_trace::record::lane;

use crate::cuda::Download;
use crate::mirrored::Mirrored;

/// The routing decisions of one layer for the tokens of a pass.
#[derive(Default)]
pub struct Routing {
    /// Selected experts `(token, n_expert_used)`, best first. They are the input of kernels and have the type of ggml's
    /// tensor.
    pub ids: Mirrored<i32>,
    /// Weight of each selected expert as applied `(token, n_expert_used)`.
    pub weights: Mirrored<f32>,
    /// Selected experts per token.
    pub n_expert_used: usize,
    /// The D2H copy of ids and weights for the records, if they are on a GPU.
    pub(crate) copy: Option<Download>,
}

impl Routing {
    /// Replaces the decisions; reuses the memory. `ids` are experts of the model.
    pub(crate) fn set(&mut self, ids: &[ExpertId], weights: &[f32], n_expert_used: usize) {
        let own = self.ids.host_mut();
        own.clear();
        own.extend(ids.iter().map(|id| id.0 as i32));
        let own = self.weights.host_mut();
        own.clear();
        own.extend_from_slice(weights);
        self.n_expert_used = n_expert_used;
        self.copy = None;
    }
}

/// Number of expert computations per lane, indexed by the numbers of [`moe_trace::record::lane`].
pub type LaneCounts = [u64; lane::NAMES.len()];

/// Lane of each expert of an operation: a number of [`moe_trace::record::lane`].
#[derive(Clone, Copy)]
pub enum Lanes<'a> {
    /// The same lane for all.
    All(u8),
    /// A lane for each `(token, n_expert_used)`.
    Each(&'a [u8]),
    /// Known at the end of the pass (`Recorder::late_lanes`).
    Late,
}

impl Lanes<'_> {
    /// Number of experts per lane, of `n` in total.
    pub(crate) fn count(&self, n: usize) -> LaneCounts {
        let mut counts = LaneCounts::default();
        let mut add = |lane: u8, n: u64| counts[usize::from(lane)] += n;
        match self {
            Lanes::All(lane) => add(*lane, n as u64),
            Lanes::Each(lanes) => lanes.iter().for_each(|&lane| add(lane, 1)),
            Lanes::Late => {}
        }
        counts
    }

    /// Lane of element `slot` of `(token, n_expert_used)`.
    pub(super) fn of(&self, slot: usize) -> u8 {
        match self {
            Lanes::All(lane) => *lane,
            Lanes::Each(lanes) => lanes[slot],
            Lanes::Late => lane::UNKNOWN,
        }
    }
}
