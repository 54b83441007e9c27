//! The experts of a layer with a hot cache: hot lanes on GPUs, hot and cold lanes on the CPU, and the sum of their results.
//!
//! The operations have the records of a layer without a cache. If the CPU computes any expert, the times are those of the CPU;
//! the launches of the lanes on GPUs, which run at the same time, have no records of their own.

mod call;
mod count;
mod launch;
mod products;
mod sum;

use std::time::{Duration, Instant};

use call::{CpuLane, LaneCall};
use launch::GpuLanes;
use moe_placement::perf::{LaneIndex, PerfMode};
use moe_placement::update::Exchange;
use moe_trace::LayerId;
use moe_trace::record::lane;
use products::Products;

use crate::activation::{Activation, NodeName};
use crate::cpu::glu::Glu;
use crate::cuda::{Device, Policy};
use crate::device_id::DeviceId;
use crate::devices::TimePoint;
use crate::error::Result;
use crate::hot_cache::{Call, HotCache, HotCacheReport, LaneContents, replace_lanes};
use crate::model::Model;
use crate::ops::experts::{GatedActivation, Projection};
use crate::ops::weighted_inputs::WeightedInputs;
use crate::ops::{At, Ops, SwigluLimit};
use crate::recorder::{LaneCounts, Lanes, Routing};
use crate::weights::Linear;

/// The experts of a layer and the names of their nodes.
#[derive(Clone, Copy)]
pub(crate) struct ExpertNodes<'a, 'g> {
    /// The layer.
    pub at: At,
    /// Gate, up and down.
    pub projections: [Projection<'a, 'g>; 3],
    /// Name of the activation.
    pub activated: NodeName,
    /// The activation.
    pub glu: Glu,
    /// Its limit, if it has one.
    pub limit: Option<SwigluLimit>,
    /// Names of the weighted sum.
    pub merge: MergeNames,
}

/// Names of the nodes of the weighted sum of a layer.
#[derive(Clone, Copy)]
pub(crate) struct MergeNames {
    /// Expert weights.
    pub weights: NodeName,
    /// Whether the weights are applied to the inputs of the experts. Then the sum has no weights.
    pub weights_first: bool,
    /// The sum.
    pub sum: NodeName,
}

impl<'a, 'g> ExpertNodes<'a, 'g> {
    pub(super) fn linears(&self) -> [&'a Linear<'g>; 3] {
        self.projections.map(|projection| projection.linear)
    }

    pub(super) fn activation(&self) -> GatedActivation<'_> {
        GatedActivation {
            name: self.activated,
            glu: self.glu,
            limit: self.limit.as_ref(),
        }
    }
}

/// Inputs and results of the experts of a layer.
pub(crate) struct ExpertIo<'b> {
    /// Activations `(token, n_embd)`.
    pub x: &'b mut Activation,
    /// Buffer of activations multiplied by expert weights `(token, slot, n_embd)`.
    pub weighted: &'b mut Activation,
    /// The selected experts.
    pub routing: &'b mut Routing,
    /// Gate, up and down `(token, slot, width)`.
    pub buffers: [&'b mut Activation; 3],
    /// Sum of the results, multiplied by the router weights `(token, n_embd)`.
    pub dst: &'b mut Activation,
}

impl Ops<'_> {
    /// Builds a hot cache with `lanes`, replacing the previous one.
    ///
    /// # Errors
    /// The model or the list of devices does not have the contents of a lane, there are lanes and an adapter changes experts, or a GPU
    /// failed.
    pub(crate) fn enable_hot_cache(
        &mut self,
        model: &Model,
        lanes: &[LaneContents],
        counters: PerfMode,
    ) -> Result<HotCacheReport> {
        if !lanes.is_empty() {
            model.check_cached_experts()?;
        }
        self.disable_hot_cache();
        let (cache, report) = HotCache::build(model, &mut self.devices, lanes, counters)?;
        self.hot = Some(Box::new(cache));
        // Copies from registered files are asynchronous.
        self.wait_for_gpus()?;
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
    fn uses_lanes(&self, il: LayerId, linears: [&Linear; 3], tokens: usize) -> bool {
        let cache = self.hot.as_deref().and_then(|cache| cache.layer(il));
        if !cache.is_some_and(|cache| cache.complete.is_none() && cache.is_cached()) {
            return false;
        }
        let is_copied = |linear: &Linear| {
            self.devices.policy() == Policy::Gpu || self.devices.copies_for(&linear.weights, tokens)
        };
        let supported = |linear: &Linear| Device::supports(linear.weights.ty);
        let copied = linears.into_iter().all(|l| is_copied(l) && supported(l));
        !copied || self.devices.gpus().is_empty()
    }

    /// Whether the CPU selects the experts of a layer from the router's scores: it needs them for the worklist, and the profile of
    /// the architecture allows it for this number of tokens. With a dynamic cache, the GPU finds the slots of the experts. Experts
    /// without a gate are not cached; then `linears` is `None`.
    pub(crate) fn routes_on_cpu(
        &self,
        il: LayerId,
        linears: Option<[&Linear; 3]>,
        tokens: usize,
    ) -> bool {
        let cache = self.hot.as_deref();
        let max_tokens = cache.map_or(0, |cache| cache.profile().cpu_routing_max_tokens);
        let uses_lanes = |linears| self.uses_lanes(il, linears, tokens);
        self.dynamic.is_none() && tokens <= max_tokens && linears.is_some_and(uses_lanes)
    }

    /// The operations of the selected experts. Returns the number of down products per lane.
    pub(crate) fn experts(&mut self, nodes: &ExpertNodes, mut io: ExpertIo) -> LaneCounts {
        if let Some(lanes) = self.run_ahead(nodes, &mut io) {
            return lanes;
        }
        self.prepare_slots(nodes.at.il, io.x, io.routing);
        let uses_lanes = self.uses_lanes(nodes.at.il, nodes.linears(), io.x.rows);
        let lanes = match self.hot.take_if(|_| uses_lanes) {
            Some(mut cache) => {
                let lanes = self.run_lanes(&mut cache, nodes, io);
                self.hot = Some(cache);
                lanes
            }
            None => self.all_experts(nodes, io),
        };
        self.release_slots(nodes.at.il);
        self.end_call(nodes.at);
        lanes
    }

    /// The operations of the selected experts without lanes.
    fn all_experts(&mut self, nodes: &ExpertNodes, io: ExpertIo) -> LaneCounts {
        let ExpertIo {
            mut x,
            weighted,
            routing,
            buffers: [gate_out, up_out, down_out],
            dst,
        } = io;
        let [gate, up, down] = nodes.projections;
        if nodes.merge.weights_first {
            let mut inputs = WeightedInputs {
                x: &mut *x,
                rows: &mut *weighted,
            };
            self.weigh_inputs(nodes.at.il, nodes.merge.weights, routing, &mut inputs);
            x = weighted;
        }
        let activation = nodes.activation();
        let mut layer = self.begin_experts(nodes.at.il, down.linear, routing);
        let outs = [&mut *gate_out, up_out];
        self.gate_up(&mut layer, [gate, up], activation, x, routing, outs);
        let lanes = self.down_and_merge(layer, down, nodes.merge, gate_out, routing, down_out, dst);
        self.count_without_lanes(nodes.at.il, &down.linear.weights, routing, &lanes);
        lanes
    }

    /// The operations of the selected experts with the lanes of `cache`: the worklist, the lanes on GPUs and those on the CPU at
    /// the same time, the sum of their results.
    fn run_lanes(
        &mut self,
        cache: &mut HotCache,
        nodes: &ExpertNodes,
        mut io: ExpertIo,
    ) -> LaneCounts {
        let mut scope = self.start_experts();
        self.fetch_expert_inputs(io.x, io.routing, true);
        self.fetch(&mut io.routing.weights);
        let (is_timed, profile) = (cache.is_timed(), cache.profile());
        let Some(Call {
            layer,
            devices,
            scratch,
            events,
        }) = cache.call(nodes.at.il)
        else {
            return LaneCounts::default();
        };
        let n_failed = events.failed_calls;
        let now = || is_timed.then(Instant::now);
        let listing = now();
        let (k, ids) = (io.routing.n_expert_used, io.routing.ids.host());
        let weights = io.routing.weights.host();
        scratch.work.fill(ids, weights, k, &layer.places);
        scratch.times.worklist = listing.map_or(Duration::ZERO, |start| start.elapsed());
        let call = LaneCall {
            nodes,
            layer,
            devices,
            work: &scratch.work,
            k,
            is_timed,
            direct_merge: profile.direct_merge,
        };
        call.shape(&mut io);

        let mut gpus = GpuLanes::new(&mut scratch.sums, &mut scratch.staged, events);
        gpus.copy_inputs(self, &call, io.x);
        if nodes.merge.weights_first {
            let mut inputs = WeightedInputs {
                x: &mut *io.x,
                rows: &mut *io.weighted,
            };
            let work = (&scratch.work, &*io.routing);
            self.weigh_entries(nodes.at.il, nodes.merge.weights, work, &mut inputs);
            std::mem::swap(&mut io.x, &mut io.weighted);
        }
        let start = now();
        let on_cpu = self.gate_products(&call, &mut gpus, &mut scratch.groups, &mut io);
        scratch.times.gpu_lanes = gpus.spans;
        call.list_lanes(&gpus.is_on, &mut scratch.computed_by);
        scratch.record_lanes.clear();
        let numbers = scratch.computed_by.iter().map(|lane| lane_number(*lane));
        scratch.record_lanes.extend(numbers);
        replace_lanes(&mut scratch.record_lanes, &scratch.slot_lanes);

        let computes = on_cpu.iter().any(Option::is_some);
        if !computes && let Some(first) = gpus.first.take() {
            scope = first;
        }
        let lanes = Lanes::Each(&scratch.record_lanes);
        let counts = lanes.count(scratch.record_lanes.len());
        let products = Products {
            nodes,
            lanes: &on_cpu,
            experts: (&*io.routing, lanes),
        };
        let [gate_out, up_out, down_out] = io.buffers;
        let outs = [gate_out, up_out, &mut *down_out];
        self.finish_products(&mut scope, &products, io.x, outs);
        if computes && let (Some(start), Some(end)) = (start, now()) {
            scratch.times.cpu = Some((TimePoint::Cpu(start), TimePoint::Cpu(end)));
            let entries = |lane: &Option<CpuLane>| lane.as_ref().map_or(0, CpuLane::len);
            scratch.times.cpu_entries = on_cpu.each_ref().map(entries);
        }
        let rows = (down_out, computes);
        self.sum_lanes(scope, &call, &mut gpus, rows, io.routing, io.dst);

        gpus.events.skipped(call.work);
        let has_failed = gpus.events.failed_calls > n_failed;
        cache.count(nodes.at.il, io.routing.ids.host(), has_failed);
        counts
    }

    /// The first error of a GPU.
    fn failure(&self, gpu: DeviceId) -> Option<&String> {
        self.devices.gpu(gpu)?.fallbacks.first.as_ref()
    }
}

/// Lane in records of an expert that a lane of the cache computed.
fn lane_number(lane: LaneIndex) -> u8 {
    match lane {
        LaneIndex::Cold => lane::CPU,
        _ => lane::HOT_CACHE,
    }
}
