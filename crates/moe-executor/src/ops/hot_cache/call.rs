//! A call of a layer: its worklist, and the lanes on the CPU.

use std::ops::Range;

use moe_placement::perf::LaneIndex;

use super::{ExpertIo, ExpertNodes};
use crate::activation::NodeName;
use crate::cpu::matmul::Worklist;
use crate::device_id::DeviceId;
use crate::hot_cache::{Compact, LANES, LaneWorklist, LayerCache, N_LANES};

/// What the steps of a call have in common.
pub(super) struct LaneCall<'c, 'g> {
    pub(super) nodes: &'c ExpertNodes<'c, 'g>,
    pub(super) layer: &'c LayerCache,
    /// Device of each hot lane.
    pub(super) devices: &'c [DeviceId],
    pub(super) work: &'c LaneWorklist,
    /// Selected experts per token.
    pub(super) k: usize,
    /// Whether times are measured.
    pub(super) is_timed: bool,
    /// Whether a lane on a GPU computes only its own entries of a single token.
    pub(super) direct_merge: bool,
}

/// A lane that the CPU computes.
pub(super) struct CpuLane<'c> {
    /// Its entries in the worklist.
    entries: Range<usize>,
    /// Token of each entry.
    pub(super) tokens: &'c [u32],
    /// Index of the matrices of each entry.
    pub(super) indices: &'c [i32],
    /// Expert of each entry.
    pub(super) experts: &'c [i32],
    /// Whether the input has a row for each entry, instead of one for each token.
    pub(super) has_own_rows: bool,
    /// Copies of gate, up and down; `None`: those of the file.
    pub(super) copies: Option<&'c [Compact; 3]>,
    /// The entries grouped by `indices`.
    pub(super) group: &'c Worklist,
}

impl CpuLane<'_> {
    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The elements of its entries in `(entry, width)`, in the order of the worklist.
    pub(super) fn elements(&self, width: usize) -> Range<usize> {
        self.entries.start * width..self.entries.end * width
    }
}

impl<'c> LaneCall<'c, '_> {
    /// Sets the shapes of the results.
    pub(super) fn shape(&self, io: &mut ExpertIo) {
        let outs = io.buffers.iter_mut().zip(&self.nodes.projections);
        for (out, projection) in outs {
            let n_out = projection.linear.weights.n_out;
            out.shape(projection.names[0], n_out, self.work.len());
        }
        io.dst.shape(self.sum_name(), self.n_embd(), io.x.rows);
    }

    /// Name of the sum of all lanes.
    pub(super) fn sum_name(&self) -> NodeName {
        self.nodes.merge.sum
    }

    /// Width of the sum of all lanes.
    pub(super) fn n_embd(&self) -> usize {
        let [_, _, down] = self.nodes.linears();
        down.weights.n_out
    }

    /// Whether a lane has entries.
    pub(super) fn has(&self, lane: LaneIndex) -> bool {
        self.work.count(lane) > 0
    }

    /// Copies of the matrices of a lane in CPU memory; `None` for the cold lane and for lanes on GPUs.
    fn copies(&self, lane: LaneIndex) -> Option<&'c [Compact; 3]> {
        let part = self.layer.lanes[lane.hot_index()?].as_ref();
        part?.on_cpu.as_ref()
    }

    /// Index of the matrices of each entry of a lane on the CPU.
    fn indices(&self, lane: LaneIndex) -> &'c [i32] {
        match self.copies(lane) {
            Some(_) => self.work.indices(lane),
            None => self.work.experts(lane),
        }
    }

    /// Groups the entries of a lane on the CPU by their matrices.
    pub(super) fn group(&self, lane: LaneIndex, groups: &mut [Worklist; N_LANES]) {
        groups[lane as usize].fill(self.indices(lane), self.layer.n_matrices(lane));
    }

    /// A lane that the CPU computes, after [`LaneCall::group`].
    pub(super) fn cpu_lane(&self, lane: LaneIndex, groups: &'c [Worklist; N_LANES]) -> CpuLane<'c> {
        CpuLane {
            entries: self.work.range(lane),
            tokens: self.work.tokens(lane),
            indices: self.indices(lane),
            experts: self.work.experts(lane),
            has_own_rows: self.nodes.merge.weights_first,
            copies: self.copies(lane),
            group: &groups[lane as usize],
        }
    }

    /// Lists the lane that computes each entry. With a lane that failed on a GPU, this is the cold lane.
    pub(super) fn list_lanes(&self, is_on_gpu: &[bool; N_LANES], lanes: &mut Vec<LaneIndex>) {
        let computed_by = LANES.map(|lane| {
            let is_hot = is_on_gpu[lane as usize] || self.copies(lane).is_some();
            if is_hot { lane } else { LaneIndex::Cold }
        });
        lanes.clear();
        let entries = self.work.lanes().iter();
        lanes.extend(entries.map(|&lane| computed_by[lane as usize]));
    }
}
