//! The router's choice, as operations and records see it.

use moe_trace::record::lane;

use crate::cuda::Download;
use crate::mirrored::Mirrored;

/// The router's choice for some rows.
#[derive(Default)]
pub struct Routing {
    /// Chosen experts `(row, n_expert_used)`, best first.
    pub ids: Mirrored<i32>,
    /// Weight of each as applied `(row, n_expert_used)`.
    pub weights: Mirrored<f32>,
    /// Experts of a row.
    pub n_expert_used: usize,
    /// Where both are on their way from a GPU to, for the records.
    pub(crate) copy: Option<Download>,
}

impl Routing {
    /// Makes it another choice, in the memory that it has.
    pub(crate) fn choose(&mut self, ids: &[i32], weights: &[f32], n_expert_used: usize) {
        let own = self.ids.host_mut();
        own.clear();
        own.extend_from_slice(ids);
        let own = self.weights.host_mut();
        own.clear();
        own.extend_from_slice(weights);
        self.n_expert_used = n_expert_used;
        self.copy = None;
    }
}

/// How many experts were computed where, by the numbers of [`moe_trace::record::lane`].
pub type LaneCounts = [u64; lane::NAMES.len()];

/// Where each expert of an operation was computed, by the numbers of [`moe_trace::record::lane`].
#[derive(Clone, Copy)]
pub enum Lanes<'a> {
    /// All alike.
    All(u8),
    /// One by one `(row, n_expert_used)`.
    Each(&'a [u8]),
}

impl Lanes<'_> {
    /// How many of `n` experts were computed where.
    pub(crate) fn count(&self, n: usize) -> LaneCounts {
        let mut counts = LaneCounts::default();
        let mut add = |lane: u8, n: u64| counts[usize::from(lane)] += n;
        match self {
            Lanes::All(lane) => add(*lane, n as u64),
            Lanes::Each(lanes) => lanes.iter().for_each(|&lane| add(lane, 1)),
        }
        counts
    }

    pub(super) fn of(&self, slot: usize) -> u8 {
        match self {
            Lanes::All(lane) => *lane,
            Lanes::Each(lanes) => lanes[slot],
        }
    }
}
