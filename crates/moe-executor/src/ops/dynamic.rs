//! The dynamic cache in a MoE layer: the selected experts are copied to slots before the layer computes them.

use moe_placement::perf::PerfMode;
use moe_trace::{LayerId, Phase};

use crate::activation::Activation;
use crate::error::Result;
use crate::hot_cache::{DynamicParams, DynamicReport, DynamicSlots};
use crate::model::Model;
use crate::ops::Ops;
use crate::recorder::Routing;

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
        let is_generated = self.recorder.phase() == Phase::Generate;
        if let (Some(slots), Some(hot)) = (&mut self.dynamic, &mut self.hot) {
            slots.prepare(hot, &mut self.devices, il, routing.ids.host(), is_generated);
        }
    }

    /// Ends the call of a layer after [`Ops::prepare_slots`].
    pub(super) fn release_slots(&mut self, il: LayerId) {
        if let (Some(slots), Some(hot)) = (&mut self.dynamic, &mut self.hot) {
            slots.release(hot, il);
        }
    }
}
