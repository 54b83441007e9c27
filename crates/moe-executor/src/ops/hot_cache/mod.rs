//! The experts of a layer with a hot cache: hot lanes on GPUs, hot and cold lanes on the CPU, and the sum of their results.
//!
//! The operations have the records of a layer without a cache. If the CPU computes any expert, the times are those of the CPU;
//! the launches of the lanes on GPUs, which run at the same time, have no records of their own.

mod count;
mod products;
mod sum;

use std::time::{Duration, Instant};

use moe_placement::perf::{LaneIndex, PerfMode};
use moe_placement::update::Exchange;
use moe_trace::LayerId;
use moe_trace::record::lane;
use products::{CpuLane, Products, elements};

use crate::activation::{Activation, NodeName};
use crate::cpu::glu::Glu;
use crate::cuda::{Device, Entries, HotCall, Policy};
use crate::devices::TimePoint;
use crate::error::Result;
use crate::hot_cache::{
    Call, HotCache, HotCacheReport, LANES, LaneContents, N_LANES, replace_lanes,
};
use crate::model::Model;
use crate::ops::experts::Projection;
use crate::ops::{Ops, Scope, number, router};
use crate::placement::DeviceId;
use crate::recorder::{LaneCounts, Lanes, Routing, Source};
use crate::weights::Linear;

/// The experts of a layer and the names of their nodes.
#[derive(Clone, Copy)]
pub(crate) struct ExpertNodes<'a, 'g> {
    /// Layer.
    pub il: LayerId,
    /// Gate, up and down.
    pub projections: [Projection<'a, 'g>; 3],
    /// Name of the activation.
    pub activated: NodeName,
    /// The activation.
    pub glu: Glu,
    /// Name of the expert weights.
    pub weights_name: NodeName,
}

impl<'a, 'g> ExpertNodes<'a, 'g> {
    pub(super) fn linears(&self) -> [&'a Linear<'g>; 3] {
        self.projections.map(|projection| projection.linear)
    }
}

/// Buffers of the experts of a layer: gate, up and down `(token, slot, width)`.
pub(crate) type Buffers<'b> = [&'b mut Activation; 3];

/// Launches the lanes on GPUs.
type Launch<'l, 'o> = &'l mut dyn FnMut(&mut Ops<'o>);

impl<'o> Ops<'o> {
    /// Builds a hot cache with `lanes`, replacing the previous one.
    ///
    /// # Errors
    /// The model or the list of devices does not have the contents of a lane.
    pub(crate) fn enable_hot_cache(
        &mut self,
        model: &Model,
        lanes: &[LaneContents],
        counters: PerfMode,
    ) -> Result<HotCacheReport> {
        self.disable_hot_cache();
        let (cache, report) = HotCache::build(model, &mut self.devices, lanes, counters)?;
        self.hot = Some(Box::new(cache));
        Ok(report)
    }

    /// Removes the hot cache or the dynamic cache, and frees its memory.
    pub(crate) fn disable_hot_cache(&mut self) {
        self.hot = None;
        self.dynamic = None;
        self.devices
            .gpus_mut()
            .iter_mut()
            .for_each(Device::clear_hot);
    }

    /// Replaces cached experts. Returns the number of completed exchanges.
    pub(crate) fn exchange(&mut self, model: &Model, exchanges: &[Exchange]) -> usize {
        let devices = &mut self.devices;
        let cache = self.hot.as_mut();
        cache.map_or(0, |cache| cache.exchange(model, devices, exchanges))
    }

    /// Whether the lanes of the hot cache compute the experts of a layer. Otherwise they are computed like those of a layer
    /// without cached experts: all of them are resident on a GPU, or copied to it for this number of tokens.
    pub(crate) fn uses_lanes(&self, il: LayerId, linears: [&Linear; 3], routing: &Routing) -> bool {
        let cache = self.hot.as_deref().and_then(|cache| cache.layer(il));
        if !cache.is_some_and(|cache| cache.complete.is_none() && cache.is_cached()) {
            return false;
        }
        let tokens = routing.ids.len() / routing.n_expert_used.max(1);
        let is_copied = |linear: &Linear| {
            self.devices.policy() == Policy::Gpu || self.devices.copies_for(&linear.weights, tokens)
        };
        let supported = |linear: &Linear| Device::supports(linear.weights.ty);
        let copied = linears.into_iter().all(|l| is_copied(l) && supported(l));
        !copied || self.devices.gpus().is_empty()
    }

    /// The operations of the selected experts: `dst (token, n_embd)` is their sum for each row of `x (token, n_embd)`, multiplied
    /// by the router weights. Returns the number of down products per lane.
    pub(crate) fn experts(
        &mut self,
        device: DeviceId,
        nodes: &ExpertNodes,
        x: &mut Activation,
        routing: &mut Routing,
        buffers: Buffers,
        dst: &mut Activation,
    ) -> LaneCounts {
        let [gate, up, down] = buffers;
        let outs = [&mut *gate, &mut *up, &mut *down];
        if let Some(lanes) = self.run_ahead(nodes, x, routing, outs, dst) {
            return lanes;
        }
        let buffers = [gate, up, down];
        self.prepare_slots(nodes.il, x, routing);
        let lanes = if self.uses_lanes(nodes.il, nodes.linears(), routing) {
            self.hot_experts(device, nodes, x, routing, buffers, dst)
        } else {
            self.all_experts(nodes, x, routing, buffers, dst)
        };
        self.release_slots(nodes.il);
        self.end_call(device, nodes.il);
        lanes
    }

    /// The operations of the selected experts without lanes.
    fn all_experts(
        &mut self,
        nodes: &ExpertNodes,
        x: &mut Activation,
        routing: &mut Routing,
        buffers: Buffers,
        dst: &mut Activation,
    ) -> LaneCounts {
        let [gate, up, down] = nodes.projections;
        let [gate_out, up_out, down_out] = buffers;
        let glu = (nodes.activated, nodes.glu);
        let mut layer = self.begin_experts(nodes.il, down.linear, routing);
        self.gate_up(&mut layer, [gate, up], glu, x, routing, [gate_out, up_out]);
        let weights_name = nodes.weights_name;
        let lanes =
            self.down_and_merge(layer, down, weights_name, gate_out, routing, down_out, dst);
        self.count_without_lanes(nodes, routing, &lanes);
        lanes
    }

    /// Computes the experts of a layer with the lanes of the hot cache: `dst (token, n_embd)` is the sum over the selected
    /// experts of each token, multiplied by their router weights. `x (token, n_embd)`. Returns the number of down products per
    /// lane.
    pub(crate) fn hot_experts(
        &mut self,
        device: DeviceId,
        nodes: &ExpertNodes,
        x: &mut Activation,
        routing: &mut Routing,
        buffers: Buffers,
        dst: &mut Activation,
    ) -> LaneCounts {
        let Some(mut cache) = self.hot.take() else {
            return LaneCounts::default();
        };
        let counts = self.run_lanes(&mut cache, device, nodes, x, routing, buffers, dst);
        self.hot = Some(cache);
        counts
    }

    #[allow(clippy::too_many_arguments)] // the cache, and the arguments of `hot_experts`
    fn run_lanes(
        &mut self,
        cache: &mut HotCache,
        device: DeviceId,
        nodes: &ExpertNodes,
        x: &mut Activation,
        routing: &mut Routing,
        [gate_out, up_out, down_out]: Buffers,
        dst: &mut Activation,
    ) -> LaneCounts {
        let mut scope = self.start_experts();
        self.fetch_expert_inputs(x, routing, true);
        self.fetch(&mut routing.weights);
        let mode = cache.mode();
        let Some(Call {
            layer,
            devices,
            scratch,
            events,
        }) = cache.call(nodes.il)
        else {
            return LaneCounts::default();
        };
        let failed_before = events.failed_calls;
        let is_timed = mode == PerfMode::Full;
        let now = || TimePoint::Cpu(Instant::now());
        let listing = is_timed.then(Instant::now);
        let (k, ids) = (routing.n_expert_used, routing.ids.host());
        scratch
            .work
            .fill(ids, routing.weights.host(), k, &layer.places);
        let times = &mut scratch.times;
        times.worklist = listing.map_or(Duration::ZERO, |start| start.elapsed());
        let work = &scratch.work;
        let [gate, up, down] = nodes.projections;
        for (out, projection) in [
            (&mut *gate_out, gate),
            (&mut *up_out, up),
            (&mut *down_out, down),
        ] {
            let n_out = projection.linear.weights.n_out;
            out.shape(projection.names[0], n_out, work.len());
        }
        let n_embd = down.linear.weights.n_out;
        let out_name = NodeName::of("ffn_moe_out", nodes.il);
        dst.shape(out_name, n_embd, x.rows);

        // The lanes on GPUs. The first one writes `dst`, the others are added.
        let mut inputs = [None; N_LANES];
        for (lane, &gpu) in LaneIndex::HOT.into_iter().zip(devices) {
            if work.count(lane) > 0 && gpu != DeviceId::Cpu {
                let input = &mut inputs[lane as usize];
                let mut copied = self.start();
                let is_copied = self.try_on(&mut copied, gpu, false, |gpu| {
                    *input = Some(gpu.hot_input(x)?);
                    Ok(())
                });
                if !is_copied {
                    events.failed(self.failure(gpu));
                }
            }
        }
        let planned = inputs.map(|input| input.is_some());
        let mut on_gpu = planned;
        let mut first: Option<Scope> = None;
        let mut launch = |ops: &mut Self| {
            for (index, &gpu) in devices.iter().enumerate() {
                let (Some(input), Some(part)) = (inputs[index], &layer.lanes[index]) else {
                    continue;
                };
                let sum = match first {
                    None => &mut *dst,
                    Some(_) => {
                        scratch.partials[index].shape(out_name, n_embd, x.rows);
                        &mut scratch.partials[index]
                    }
                };
                let (lane, dummy) = (LaneIndex::HOT[index], part.experts.len());
                let hot = HotCall {
                    lane: index,
                    linears: nodes.linears(),
                    glu: nodes.glu,
                    input,
                    k: work.stage(lane, dummy, k, &mut scratch.staged),
                    tokens: x.rows,
                    entries: Entries::Staged(&scratch.staged),
                };
                let mut launched = ops.start();
                let is_timed = is_timed || ops.recorder.is_on();
                if ops.try_on(&mut launched, gpu, is_timed, |gpu| gpu.hot_lane(&hot, sum)) {
                    times.gpu_lanes[index] = launched.span();
                    first.get_or_insert(launched);
                } else {
                    on_gpu[index] = false;
                    events.failed(ops.failure(gpu));
                }
            }
        };

        // The lanes on the CPU. The calling thread launches those on GPUs while the other threads compute.
        let lane_on_cpu = |lane: LaneIndex| {
            let part = lane.hot_index().and_then(|lane| layer.lanes[lane].as_ref());
            let copies = part.and_then(|part| part.on_cpu.as_ref());
            CpuLane {
                lane,
                indices: match copies {
                    Some(_) => work.indices(lane),
                    None => work.experts(lane),
                },
                copies,
            }
        };
        let cpu_start = is_timed.then(now);
        let is_planned = |lane| work.count(lane) > 0 && !planned[lane as usize];
        let mut launch: Option<Launch<'_, 'o>> = Some(&mut launch);
        for lane in LANES.into_iter().filter(|&lane| is_planned(lane)) {
            let group = &mut scratch.groups[lane as usize];
            let n = layer.n_matrices(lane);
            let lane = lane_on_cpu(lane);
            group.fill(lane.indices, n);
            self.multiply(work, group, &lane, (0, &gate), x, gate_out, launch.take());
        }
        if let Some(launch) = launch.take() {
            launch(self);
            self.recorder.host_is_free();
        }
        // Those that failed on a GPU.
        let has_failed = |lane: LaneIndex| planned[lane as usize] && !on_gpu[lane as usize];
        for lane in LANES.into_iter().filter(|&lane| has_failed(lane)) {
            let group = &mut scratch.groups[lane as usize];
            let n = layer.n_matrices(lane);
            let lane = lane_on_cpu(lane);
            group.fill(lane.indices, n);
            self.multiply(work, group, &lane, (0, &gate), x, gate_out, None);
        }
        let is_used = |lane: LaneIndex| work.count(lane) > 0 && !on_gpu[lane as usize];
        let on_cpu = LANES.map(|lane| is_used(lane).then(|| lane_on_cpu(lane)));
        let computes = on_cpu.iter().any(Option::is_some);
        let is_hot = |lane: LaneIndex| on_gpu[lane as usize] || lane_on_cpu(lane).copies.is_some();
        let number = |&lane: &LaneIndex| {
            if is_hot(lane) {
                lane::HOT_CACHE
            } else {
                lane::CPU
            }
        };
        scratch.record_lanes.clear();
        scratch.record_lanes.extend(work.lanes().iter().map(number));
        replace_lanes(&mut scratch.record_lanes, &scratch.slot_lanes);
        let lanes = Lanes::Each(&scratch.record_lanes);
        if let Some(first) = first
            && !computes
        {
            scope = first;
        }
        let products = Products {
            work,
            lanes: &on_cpu,
            experts: (&*routing, lanes),
        };
        self.finish_projection(&mut scope, &products, (0, &gate), x, gate_out);
        for lane in on_cpu.iter().flatten() {
            let group = &scratch.groups[lane.lane as usize];
            self.multiply(work, group, lane, (1, &up), x, up_out, None);
        }
        self.finish_projection(&mut scope, &products, (1, &up), x, up_out);
        let before = Source::from(&*gate_out);
        for lane in on_cpu.iter().flatten() {
            let width = gate_out.width;
            let range = elements(work, lane.lane, width);
            let gate = &mut gate_out.data_mut()[range.clone()];
            nodes.glu.apply(self.threads, gate, &up_out.data()[range]);
        }
        gate_out.name = nodes.activated;
        let sources = [before, (&*up_out).into()];
        self.record(&mut scope, number::GLU, nodes.activated, &sources);
        for lane in on_cpu.iter().flatten() {
            let group = &scratch.groups[lane.lane as usize];
            self.multiply(work, group, lane, (2, &down), gate_out, down_out, None);
        }
        self.finish_projection(&mut scope, &products, (2, &down), gate_out, down_out);
        if let Some(start) = cpu_start.filter(|_| computes) {
            times.cpu = Some((start, now()));
            times.cpu_entries = LANES.map(|lane| if is_used(lane) { work.count(lane) } else { 0 });
        }

        // The sum.
        let is_shared = on_gpu.contains(&true);
        if computes {
            let sum = if is_shared {
                scratch.cpu_sum.shape(out_name, n_embd, x.rows);
                &mut scratch.cpu_sum
            } else {
                &mut *dst
            };
            self.sum_lanes(work, k, &on_gpu, down_out, sum);
        }
        let before = Source::from(&*down_out);
        down_out.name = NodeName::of("ffn_moe_weighted", nodes.il);
        let sources = [before, router::weights(nodes.weights_name, routing)];
        self.record(&mut scope, number::MUL, down_out.name, &sources);
        let mut merged = None;
        let partials = scratch.partials.iter_mut().enumerate();
        let partials = partials
            .filter(|(lane, _)| on_gpu[*lane])
            .map(|(_, sum)| sum);
        let cpu_sum = (computes && is_shared).then_some(&mut scratch.cpu_sum);
        // The first lane on a GPU wrote `dst`.
        for sum in partials.skip(1).chain(cpu_sum) {
            merged = Some(self.add_lane(device, sum, dst));
        }
        self.record_sum(scope, merged, nodes, down_out, k, dst);

        let counts = lanes.count(routing.ids.len());
        let is_empty = |lane| work.count(lane) == 0;
        events.skipped_hot += u64::from(LaneIndex::HOT.into_iter().all(is_empty));
        events.skipped_cold += u64::from(work.count(LaneIndex::Cold) == 0);
        let failed_after = events.failed_calls;
        let computed_by = &mut scratch.computed_by;
        computed_by.clear();
        computed_by.extend(
            work.lanes()
                .iter()
                .map(|&lane| if is_hot(lane) { lane } else { LaneIndex::Cold }),
        );
        if failed_before < failed_after {
            cache.count_fallback(nodes.il);
        }
        let computed_by = &cache.scratch.computed_by;
        cache.count(nodes.il, routing.ids.host(), computed_by);
        counts
    }

    /// The first error of a GPU.
    fn failure(&self, gpu: DeviceId) -> Option<&String> {
        self.devices.gpu(gpu)?.fallbacks.first.as_ref()
    }
}
