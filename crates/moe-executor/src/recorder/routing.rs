//! The routing decisions of a layer, and the lanes that compute the selected experts.

use std::sync::Arc;

use moe_trace::ExpertId;
use moe_trace::record::lane;

use super::rows::Finished;
use crate::cuda::{self, Download};
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

/// Selected experts of a layer and their weights, which are read at the end of the pass.
#[derive(Clone)]
pub(crate) enum SelectedExperts {
    /// Ids and weights in CPU memory.
    Here(Arc<[i32]>, Arc<[f32]>),
    /// In a D2H copy, which ends with the pass.
    InFlight(Download),
}

impl SelectedExperts {
    /// The experts of `routing`, which must be in CPU memory or have a D2H copy.
    pub(crate) fn new(routing: &Routing) -> SelectedExperts {
        match routing.copy {
            Some(copy) => SelectedExperts::InFlight(copy),
            None => SelectedExperts::Here(
                Arc::from(routing.ids.host()),
                Arc::from(routing.weights.host()),
            ),
        }
    }

    /// Ids and weights.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn read<'a>(
        &'a self,
        gpus: &'a impl Finished,
    ) -> cuda::Result<(&'a [i32], &'a [f32])> {
        match self {
            SelectedExperts::Here(ids, weights) => Ok((&**ids, &**weights)),
            SelectedExperts::InFlight(copy) => gpus.downloaded(copy),
        }
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
