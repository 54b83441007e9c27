//! The dynamic cache in a MoE layer: the selected experts are copied to slots before the layer computes them.

use moe_placement::perf::PerfMode;
use moe_trace::{LayerId, Phase};

use crate::activation::Activation;
use crate::cuda::{Entries, HotCall};
use crate::error::Result;
use crate::hot_cache::{DynamicParams, DynamicReport, DynamicSlots};
use crate::model::Model;
use crate::ops::{ExpertIo, ExpertNodes, Ops};
use crate::recorder::{LaneCounts, Lanes, Routing};

impl<'a> Ops<'a> {
    /// Builds a dynamic cache, replacing the previous hot cache.
    ///
    /// # Errors
    /// The device does not exist, or the settings do not fit to the model.
    pub(crate) fn enable_dynamic_cache(
        &mut self,
        model: &'a Model<'_>,
        params: &DynamicParams,
        counters: PerfMode,
    ) -> Result<DynamicReport> {
        model.check_cached_experts()?;
        self.disable_hot_cache();
        let (hot, slots, report) = DynamicSlots::build(model, &mut self.devices, params, counters)?;
        self.hot = Some(Box::new(hot));
        self.dynamic = Some(Box::new(slots));
        Ok(report)
    }

    /// Puts the selected experts of a layer into slots of the dynamic cache. Does nothing without one.
    pub(super) fn prepare_slots(&mut self, il: LayerId, x: &mut Activation, routing: &mut Routing) {
        if self.dynamic.is_none() {
            return;
        }
        self.fetch_expert_inputs(x, routing, true);
        let n_tokens = routing.ids.len() / routing.n_expert_used.max(1);
        let is_generated = self.recorder.phase() == Phase::Generate;
        if let (Some(slots), Some(hot)) = (&mut self.dynamic, &mut self.hot) {
            let selected = (routing.ids.host(), n_tokens);
            slots.prepare(hot, &mut self.devices, il, selected, is_generated);
        }
    }

    /// Serves the calls that were launched ahead. Without it, a wait for their GPU could last forever.
    pub(crate) fn serve_slots(&mut self) {
        if let (Some(slots), Some(hot)) = (&mut self.dynamic, &mut self.hot) {
            slots.serve(hot, &mut self.devices);
        }
    }

    /// Whether a call that was launched ahead failed, so that the results of the pass are wrong. The pass must run again; then no call is
    /// launched ahead.
    pub(crate) fn must_repeat(&mut self) -> bool {
        self.serve_slots();
        self.dynamic
            .as_mut()
            .is_some_and(|slots| slots.take_failure())
    }

    /// Ends the calls that were launched ahead in a pass that does not run again, also if one of them failed.
    pub(crate) fn end_calls_ahead(&mut self) {
        self.serve_slots();
        if let Some(slots) = &mut self.dynamic {
            slots.ignore_failure();
        }
    }

    /// Passes the lanes of calls that were launched ahead to the recorder.
    pub(super) fn record_slot_lanes(&mut self) {
        if let Some(slots) = &mut self.dynamic {
            self.recorder.late_lanes(slots.take_lanes());
        }
    }

    /// The operations of the selected experts of one token, launched before the CPU knows the routing decisions. `None` if the CPU must
    /// know them.
    pub(super) fn run_ahead(
        &mut self,
        nodes: &ExpertNodes,
        io: &mut ExpertIo,
    ) -> Option<LaneCounts> {
        let il = nodes.at.il;
        let (x, routing, dst) = (&mut *io.x, &mut *io.routing, &mut *io.dst);
        let [gate_out, up_out, down_out] = io.buffers.each_mut().map(|out| &mut **out);
        let (Some(slots), Some(hot)) = (&mut self.dynamic, &mut self.hot) else {
            return None;
        };
        let gpu = *hot.devices().first()?;
        let [gate, up, down] = nodes.projections;
        let n_out = [gate, up, down].map(|projection| projection.linear.weights.n_out);
        let (k, out_name) = (routing.n_expert_used, nodes.merge.sum);
        dst.shape(out_name, n_out[2], x.rows);
        if slots.has_failed() {
            return Some(LaneCounts::default());
        }
        let is_generated = self.recorder.phase() == Phase::Generate;
        // Factors of experts are multiplied by the router weights on the CPU, and weighted inputs have records of their own.
        let is_special = down.scales.is_some() || nodes.merge.weights_first;
        let is_on_gpu = x.rows == 1 && x.values.home() == gpu && routing.ids.home() == gpu;
        if !is_generated || !is_on_gpu || is_special {
            return None;
        }
        if hot.mode() == PerfMode::Full || !slots.runs_ahead(il) {
            return None;
        }
        slots.make_room(hot, &mut self.devices);
        let (number, dummy) = (slots.next_search(), slots.dummy(il));
        let outs = [&mut *gate_out, &mut *up_out, &mut *down_out];
        for ((out, projection), n_out) in outs.into_iter().zip(nodes.projections).zip(n_out) {
            out.shape(projection.names[0], n_out, k);
        }
        let mut scope = self.start_experts();
        let mut is_searching = false;
        let done = self.on(&mut scope, gpu, |gpu| {
            let input = gpu.hot_input(x)?;
            let router = routing.weights.device(gpu.gpu())?;
            is_searching = true;
            let slots = gpu.find_slots(il, number, dummy, routing)?;
            let call = HotCall {
                lane: 0,
                linears: nodes.linears(),
                glu: nodes.activation().of_one_kernel(),
                weights_first: false,
                input,
                tokens: 1,
                k,
                entries: Entries::OnGpu { slots, router },
            };
            gpu.hot_lane(&call, dst)
        });
        let (Some(slots), Some(hot)) = (&mut self.dynamic, &mut self.hot) else {
            return None;
        };
        if is_searching {
            slots.launched(il, number, k);
        }
        if !done {
            let error = self
                .devices
                .gpu(gpu)
                .and_then(|gpu| gpu.fallbacks.first.clone());
            slots.call_failed(hot, il, error.unwrap_or_default());
            return Some(LaneCounts::default());
        }
        let lanes = Lanes::Late;
        let experts = (&*routing, lanes);
        let outs = [&mut *gate_out, up_out];
        self.gate_up_rows(&mut scope, [gate, up], nodes.activation(), x, experts, outs);
        self.project_rows(&mut scope, &down, gate_out, (&*routing, lanes), down_out);
        self.merge_rows(scope, il, nodes.merge, routing, down_out, dst);
        Some(LaneCounts::default())
    }

    /// Ends the call of a layer after [`Ops::prepare_slots`].
    pub(super) fn release_slots(&mut self, il: LayerId) {
        if let (Some(slots), Some(hot)) = (&mut self.dynamic, &mut self.hot) {
            slots.release(hot, il);
        }
    }
}
