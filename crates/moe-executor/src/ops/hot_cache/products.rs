//! Products of the lanes on the CPU.

use moe_placement::perf::LaneIndex;

use super::Launch;
use crate::activation::Activation;
use crate::cpu::matmul::{self, Entries, RowOf, Worklist};
use crate::hot_cache::{Compact, LaneWorklist, N_LANES};
use crate::ops::experts::Projection;
use crate::ops::{Ops, Scope, number, router};
use crate::recorder::{Lanes, Routing, Source};
use crate::weights::Linear;

/// A lane that the CPU computes.
pub(super) struct CpuLane<'c> {
    pub(super) lane: LaneIndex,
    /// Index of the matrices of each entry.
    pub(super) indices: &'c [i32],
    /// Copies of gate, up and down; `None`: those of the file.
    pub(super) copies: Option<&'c [Compact; 3]>,
}

/// What the products of a layer have in common.
pub(super) struct Products<'p> {
    pub(super) work: &'p LaneWorklist,
    /// The lanes on the CPU.
    pub(super) lanes: &'p [Option<CpuLane<'p>>; N_LANES],
    /// The selected experts, and their lanes in records.
    pub(super) experts: (&'p Routing, Lanes<'p>),
}

/// The elements of a lane's entries in `(entry, width)`, in the order of the worklist.
pub(super) fn elements(
    work: &LaneWorklist,
    lane: LaneIndex,
    width: usize,
) -> std::ops::Range<usize> {
    let entries = work.range(lane);
    entries.start * width..entries.end * width
}

impl<'o> Ops<'o> {
    /// Computes gate (`which` 0), up (1) or down (2) of a lane on the CPU. The calling thread calls `launch` meanwhile.
    #[allow(clippy::too_many_arguments)] // the entries, the matrices, input, output, callback
    pub(super) fn multiply(
        &mut self,
        work: &LaneWorklist,
        group: &Worklist,
        lane: &CpuLane,
        (which, projection): (usize, &Projection),
        src: &Activation,
        dst: &mut Activation,
        launch: Option<Launch<'_, 'o>>,
    ) {
        let weights = &projection.linear.weights;
        let entries = match which {
            2 => Entries {
                rows: &src.data()[elements(work, lane.lane, weights.n_in)],
                row_of: RowOf::Every(1),
                work: group,
            },
            _ => Entries {
                rows: src.data(),
                row_of: RowOf::Listed(work.tokens(lane.lane)),
                work: group,
            },
        };
        let stack = match lane.copies {
            Some(copies) => copies[which].stack(projection.linear),
            None => weights.stack(),
        };
        let out = &mut dst.data_mut()[elements(work, lane.lane, weights.n_out)];
        let (threads, mut quantized) = (self.threads, std::mem::take(&mut self.quantized));
        matmul::mul_mat_id(threads, stack, entries, out, &mut quantized, || {
            if let Some(launch) = launch {
                launch(self);
            }
        });
        self.quantized = quantized;
    }

    /// Records the products of a projection after [`Ops::multiply`], and adds the bias of the lanes on the CPU.
    pub(super) fn finish_projection(
        &mut self,
        scope: &mut Scope,
        products: &Products,
        (which, projection): (usize, &Projection),
        src: &Activation,
        dst: &mut Activation,
    ) {
        let work = products.work;
        let Linear { weights, bias } = projection.linear;
        let n_out = weights.n_out;
        dst.name = projection.names[0];
        let (routing, _) = products.experts;
        let is_reshaped = which != 2 && routing.n_expert_used > 1;
        let suffix = if is_reshaped { " (reshaped)" } else { "" };
        let ids = router::ids(projection.il, routing);
        let sources = [weights.into(), Source::view(src, suffix), ids];
        self.record_experts(
            scope,
            number::MUL_MAT_ID,
            dst.name,
            &sources,
            products.experts,
        );
        let Some(bias) = bias else {
            return;
        };
        let before = Source::from(&*dst);
        for lane in products.lanes.iter().flatten() {
            let values = match lane.copies {
                Some(copies) => copies[which].bias(),
                None => &bias.data,
            };
            let out = &mut dst.data_mut()[elements(work, lane.lane, n_out)];
            self.threads.rows(out, n_out, |entry, row| {
                let bias = &values[lane.indices[entry] as usize * n_out..][..n_out];
                row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            });
        }
        dst.name = projection.names[1];
        let sources = [before, bias.into(), ids];
        self.record_experts(scope, number::ADD_ID, dst.name, &sources, products.experts);
    }
}
