//! Post-Fetch in a MoE layer, from [llama-prefetch.cpp](https://github.com/ernestuz-b/llama-prefetch.cpp).
//!
//! H2D copies of down matrices start after the router and overlap with gate and up on the CPU. The GPU computes the down
//! products of the experts whose copy is complete.

use std::time::Instant;

use moe_trace::LayerId;
use moe_trace::record::lane;

use crate::activation::Activation;
use crate::cpu::glu::Glu;
use crate::cpu::matmul::{self, Entries, RowOf};
use crate::cuda::{Device, Policy};
use crate::device_id::DeviceId;
use crate::ops::Ops;
use crate::ops::experts::{Experts, Projection};
use crate::recorder::{LaneCounts, Lanes, Routing};
use crate::weights::Linear;

impl Ops<'_> {
    /// Starts the expert operations of a layer. With [`Policy::PostFetch`] it queues the H2D copies of the down matrices of
    /// the selected experts.
    pub fn begin_experts(&mut self, il: LayerId, down: &Linear, routing: &mut Routing) -> Experts {
        let mut experts = Experts::of(il);
        let tokens = routing.ids.len() / routing.n_expert_used.max(1);
        let stack = &down.weights;
        let Some(near) = self.devices.nearest_gpu(stack) else {
            return experts;
        };
        if self.devices.policy() != Policy::PostFetch
            || !Device::supports(stack.ty)
            || self.devices.copies_for(stack, tokens)
            || self.devices.holder(stack).is_some()
        {
            return experts;
        }
        self.fetch(&mut routing.ids);
        if let Some(gpu) = self.devices.gpu_mut(near)
            && gpu.begin_post_fetch(il.index(), stack, routing.ids.host(), tokens)
        {
            experts.fetches = Some(near);
        }
        experts
    }

    /// Launches gate and up of one token's slots from the configured CPU limit on, on the GPU that the down matrices are
    /// copied to. Returns the first of these slots; `None` if the CPU computes all slots.
    pub(super) fn gate_up_on_gpu(
        &mut self,
        layer: &Experts,
        [gate, up]: [&Linear; 2],
        glu: Glu,
        x: &mut Activation,
        routing: &mut Routing,
        [out, up_out]: [&mut Activation; 2],
    ) -> Option<usize> {
        let k = routing.n_expert_used;
        let gpu = layer.fetches?;
        let limit = self.devices.gpu(gpu)?.post_fetch_settings()?.cpu_limit?;
        if routing.ids.len() != k || limit >= k || !Device::supports(gate.weights.ty) {
            return None;
        }
        // This launch is not recorded: the record of the operation has the time of the CPU's part.
        let mut scope = self.start();
        let done = self.on(&mut scope, gpu, |gpu| {
            let outs = [out, up_out];
            let launched = gpu.experts_gate_up([gate, up], glu, x, routing, limit, outs);
            launched.map(|_| ())
        });
        if !done {
            return None;
        }
        let (ids, n_expert) = (routing.ids.host(), gate.weights.n_expert);
        self.work.fill_where(ids, n_expert, |slot| slot < limit);
        Some(limit)
    }

    /// Copies the first `slots` rows, which the CPU computed, to the GPU, which computed the other rows.
    pub(super) fn join_rows(&mut self, gpu: DeviceId, rows: &mut Activation, slots: usize) {
        let n = slots * rows.width;
        if let Some(gpu) = self.devices.gpu(gpu)
            && let Err(error) = rows.values.join(gpu.gpu(), n)
        {
            self.fault.get_or_insert(error);
        }
    }

    /// Records the window of a layer's transfers: the CPU computed gate and up from `start` to now.
    pub(super) fn end_window(&mut self, layer: &Experts, start: Instant) {
        let gpu = layer.fetches.and_then(|gpu| self.devices.gpu_mut(gpu));
        if let Some(gpu) = gpu {
            gpu.post_fetch_window(start, Instant::now());
        }
    }

    /// The down product with Post-Fetch: on the GPU for experts whose copy is complete, on the CPU for the others. Returns
    /// the number of products per lane.
    pub(super) fn project_fetched(
        &mut self,
        gpu: DeviceId,
        projection: &Projection,
        src: &mut Activation,
        routing: &mut Routing,
        dst: &mut Activation,
    ) -> LaneCounts {
        let mut scope = self.start_experts();
        let weights = &projection.linear.weights;
        let mut arrived = Vec::new();
        let done = self.on(&mut scope, gpu, |gpu| {
            arrived = gpu.mul_mat_fetched(projection.linear, src, routing, dst)?;
            Ok(())
        });
        if self.devices.gpu(gpu).is_some_and(Device::transfers_failed) {
            self.recorder.fell_back();
        }
        if !done || !arrived.contains(&true) {
            let mut scope = scope.left_to_cpu();
            self.fetch(&mut src.values);
            self.work.fill(routing.ids.host(), weights.n_expert);
            let lanes = Lanes::All(lane::POST_FETCH_MISS);
            self.project_rows(&mut scope, projection, src, (routing, lanes), dst);
            return lanes.count(routing.ids.len());
        }
        if arrived.contains(&false) {
            // Gate and up of the slots from the CPU limit on are on the GPU only.
            self.fetch(&mut src.values);
            self.project_missed(gpu, projection, src, routing, &arrived, dst);
        }
        if let (Some(scales), Some(gpu)) = (&projection.scales, self.devices.gpu_mut(gpu))
            && let Err(error) = gpu.scale_experts(scales, routing, dst)
        {
            self.fault.get_or_insert(error);
        }
        let lane = |&arrived: &bool| {
            if arrived {
                lane::POST_FETCHED
            } else {
                lane::POST_FETCH_MISS
            }
        };
        let lanes: Vec<u8> = arrived.iter().map(lane).collect();
        let lanes = Lanes::Each(&lanes);
        self.project_rows(&mut scope, projection, src, (routing, lanes), dst);
        lanes.count(routing.ids.len())
    }

    /// Computes the down products of the experts whose copy is not complete, on the CPU, and copies them into `dst` on the GPU.
    fn project_missed(
        &mut self,
        gpu: DeviceId,
        projection: &Projection,
        src: &Activation,
        routing: &Routing,
        arrived: &[bool],
        dst: &mut Activation,
    ) {
        let Linear { weights, bias } = projection.linear;
        let ids = routing.ids.host();
        let is_missed = |entry: usize| !arrived[entry];
        self.work.fill_where(ids, weights.n_expert, is_missed);
        let n_out = weights.n_out;
        let mut missed = vec![0.0; ids.len() * n_out];
        let x = Entries {
            rows: src.data(),
            row_of: RowOf::Every(1),
            work: &self.work,
        };
        let (stack, out) = (weights.stack(), &mut missed);
        matmul::mul_mat_id(self.threads, stack, x, out, &mut self.quantized, || ());
        if let Some(bias) = bias {
            let rows = missed.chunks_exact_mut(n_out).zip(ids).enumerate();
            for (_, (row, &id)) in rows.filter(|(entry, _)| is_missed(*entry)) {
                let bias = &bias.data[id as usize * n_out..][..n_out];
                row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            }
        }
        self.devices.ran(DeviceId::Cpu);
        if let Some(gpu) = self.devices.gpu_mut(gpu) {
            let put = |(at, row): (usize, &[f32])| gpu.put_row(dst, at, row);
            let rows = missed.chunks_exact(n_out).enumerate();
            let mut missed = rows.filter(|(entry, _)| is_missed(*entry));
            if let Err(error) = missed.try_for_each(put) {
                self.fault.get_or_insert(error);
            }
        }
    }
}
