//! Products of the lanes on the CPU.

use super::call::{CpuLane, LaneCall};
use super::launch::GpuLanes;
use super::{ExpertIo, ExpertNodes};
use crate::activation::Activation;
use crate::cpu::matmul::{self, Entries, RowOf, Worklist};
use crate::hot_cache::{LANES, N_LANES};
use crate::ops::experts::Projection;
use crate::ops::{Ops, Scope, number, router};
use crate::recorder::{Lanes, Routing, Source};
use crate::weights::Linear;

/// What the products of a layer have in common.
pub(super) struct Products<'p> {
    pub(super) nodes: &'p ExpertNodes<'p, 'p>,
    /// The lanes on the CPU.
    pub(super) lanes: &'p [Option<CpuLane<'p>>; N_LANES],
    /// The selected experts, and their lanes in records.
    pub(super) experts: (&'p Routing, Lanes<'p>),
}

/// Launches the lanes on GPUs.
type Launch<'l, 'o> = &'l mut dyn FnMut(&mut Ops<'o>);

impl<'o> Ops<'o> {
    /// Computes gate of the lanes on the CPU, while the calling thread launches those on GPUs. Returns the lanes on the CPU: those
    /// without a GPU, and those that failed on one.
    pub(super) fn gate_products<'c>(
        &mut self,
        call: &LaneCall<'c, '_>,
        gpus: &mut GpuLanes,
        groups: &'c mut [Worklist; N_LANES],
        io: &mut ExpertIo,
    ) -> [Option<CpuLane<'c>>; N_LANES] {
        let [gate, ..] = call.nodes.projections;
        let [gate_out, ..] = &mut io.buffers;
        let mut on_cpu = LANES.map(|lane| call.has(lane) && !gpus.is_planned(lane));
        let mut compute = |ops: &mut Self, lane, launch: Option<Launch<'_, 'o>>| {
            call.group(lane, groups);
            let lane = call.cpu_lane(lane, groups);
            ops.multiply_lane(&lane, (0, &gate), io.x, gate_out, launch);
        };
        let mut launch = |ops: &mut Self| gpus.launch(ops, call, io.dst);
        let mut launch: Option<Launch<'_, 'o>> = Some(&mut launch);
        for lane in LANES.into_iter().filter(|&lane| on_cpu[lane as usize]) {
            compute(self, lane, launch.take());
        }
        if let Some(launch) = launch {
            launch(self);
            self.recorder.host_is_free();
        }
        for lane in LANES.into_iter().filter(|&lane| gpus.has_failed(lane)) {
            on_cpu[lane as usize] = true;
            compute(self, lane, None);
        }
        let groups = &*groups;
        LANES.map(|lane| on_cpu[lane as usize].then(|| call.cpu_lane(lane, groups)))
    }

    /// The operations from the bias of gate to down, after [`Ops::gate_products`]. `x (token, n_embd)`; `outs`: gate, up and down.
    pub(super) fn finish_products(
        &mut self,
        scope: &mut Scope,
        products: &Products,
        x: &Activation,
        [gate_out, up_out, down_out]: [&mut Activation; 3],
    ) {
        let nodes = products.nodes;
        let [gate, up, down] = &nodes.projections;
        if gate.shares_node(up) {
            gate_out.name = gate.names[0];
        } else {
            self.finish_projection(scope, products, (0, gate), x, gate_out);
        }
        if let Some(limit) = &nodes.limit {
            self.limit_gate_in(scope, limit, gate_out);
        }
        for lane in products.lanes.iter().flatten() {
            self.multiply_lane(lane, (1, up), x, up_out, None);
        }
        self.finish_projection(scope, products, (1, up), x, up_out);
        if let Some(limit) = &nodes.limit {
            self.limit_up_in(scope, limit, up_out);
            self.multiply_gate_in(scope, nodes.activated, gate_out, up_out);
        } else {
            let before = Source::from(&*gate_out);
            for lane in products.lanes.iter().flatten() {
                let range = lane.elements(gate_out.width);
                let gate = &mut gate_out.data_mut()[range.clone()];
                nodes.glu.apply(self.threads, gate, &up_out.data()[range]);
            }
            gate_out.name = nodes.activated;
            let sources = [before, (&*up_out).into()];
            self.record(scope, number::GLU, nodes.activated, &sources);
        }
        for lane in products.lanes.iter().flatten() {
            self.multiply_lane(lane, (2, down), gate_out, down_out, None);
        }
        self.finish_projection(scope, products, (2, down), gate_out, down_out);
    }

    /// Computes gate (`which` 0), up (1) or down (2) of a lane on the CPU. The calling thread calls `launch` meanwhile.
    fn multiply_lane(
        &mut self,
        lane: &CpuLane,
        (which, projection): (usize, &Projection),
        src: &Activation,
        dst: &mut Activation,
        launch: Option<Launch<'_, 'o>>,
    ) {
        let weights = &projection.linear.weights;
        let (rows, row_of) = match which {
            0 | 1 if !lane.has_own_rows => (src.data(), RowOf::Listed(lane.tokens)),
            _ => (&src.data()[lane.elements(weights.n_in)], RowOf::Every(1)),
        };
        let entries = Entries {
            rows,
            row_of,
            work: lane.group,
        };
        let stack = match lane.copies {
            Some(copies) => copies[which].stack(projection.linear),
            None => weights.stack(),
        };
        let out = &mut dst.data_mut()[lane.elements(weights.n_out)];
        let (threads, mut quantized) = (self.threads, std::mem::take(&mut self.quantized));
        matmul::mul_mat_id(threads, stack, entries, out, &mut quantized, || {
            if let Some(launch) = launch {
                launch(self);
            }
        });
        self.quantized = quantized;
    }

    /// Records the products of a projection after [`Ops::multiply`], and applies the factors and the bias of the lanes on the CPU.
    fn finish_projection(
        &mut self,
        scope: &mut Scope,
        products: &Products,
        (which, projection): (usize, &Projection),
        src: &Activation,
        dst: &mut Activation,
    ) {
        let Linear { weights, bias } = projection.linear;
        let n_out = weights.n_out;
        dst.name = projection.names[0];
        let (routing, _) = products.experts;
        let has_own_rows = which == 2 || products.nodes.merge.weights_first;
        let is_reshaped = !has_own_rows && routing.n_expert_used > 1;
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
        if let Some(scales) = &projection.scales {
            let before = Source::from(&*dst);
            for lane in products.lanes.iter().flatten() {
                let out = &mut dst.data_mut()[lane.elements(n_out)];
                self.scale_rows_of_experts(scales, lane.experts, (out, n_out));
            }
            self.record_expert_scales(scope, scales, routing, (before, dst));
        }
        let Some(bias) = bias else {
            return;
        };
        let before = Source::from(&*dst);
        for lane in products.lanes.iter().flatten() {
            let values = match lane.copies {
                Some(copies) => copies[which].bias(),
                None => &bias.data,
            };
            let out = &mut dst.data_mut()[lane.elements(n_out)];
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
