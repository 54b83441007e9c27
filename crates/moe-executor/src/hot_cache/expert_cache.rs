//! The cache of a session or a replay, which both build and exchange in the same way.

use moe_placement::perf::PerfMode;
use moe_placement::update::Exchange;

use super::{DynamicParams, DynamicReport, DynamicSlots, HotCache, HotCacheReport, LaneContents};
use crate::error::Result;
use crate::model::Model;
use crate::ops::Ops;

/// The hot or dynamic cache of a session or a replay: [`Session::expert_cache`](crate::Session::expert_cache) and
/// [`Replay::expert_cache`](crate::replay::Replay::expert_cache). While it is borrowed, no pass runs, so that none uses a part of a
/// change.
pub struct ExpertCache<'s, 'a, 'g> {
    ops: &'s mut Ops<'a>,
    model: &'a Model<'g>,
}

impl<'s, 'a, 'g> ExpertCache<'s, 'a, 'g> {
    pub(crate) fn new(ops: &'s mut Ops<'a>, model: &'a Model<'g>) -> ExpertCache<'s, 'a, 'g> {
        ExpertCache { ops, model }
    }

    /// Builds a hot cache with `lanes`, replacing the previous one. It is used from the next pass on. Without lanes, selections are
    /// only counted.
    ///
    /// # Errors
    /// [`Error::HotCache`](crate::Error::HotCache) if the model or the list of devices does not have the contents of a lane,
    /// [`Error::AdaptedExperts`](crate::Error::AdaptedExperts) if there are lanes, and an adapter changes experts.
    pub fn enable_hot_cache(
        &mut self,
        lanes: &[LaneContents],
        counters: PerfMode,
    ) -> Result<HotCacheReport> {
        self.ops.enable_hot_cache(self.model, lanes, counters)
    }

    /// Builds a dynamic cache, replacing the previous hot cache. It is used from the next pass on; [`ExpertCache::hot_cache`] has
    /// its counters of lanes.
    ///
    /// # Errors
    /// [`Error::HotCache`](crate::Error::HotCache) if the device does not exist,
    /// [`Error::AdaptedExperts`](crate::Error::AdaptedExperts) if an adapter changes experts,
    /// [`Error::DynamicCache`](crate::Error::DynamicCache) if the settings do not fit to the model.
    pub fn enable_dynamic_cache(
        &mut self,
        params: &DynamicParams,
        counters: PerfMode,
    ) -> Result<DynamicReport> {
        self.ops.enable_dynamic_cache(self.model, params, counters)
    }

    /// The hot cache, if it is enabled.
    pub fn hot_cache(&self) -> Option<&HotCache> {
        self.ops.hot.as_deref()
    }

    /// The dynamic cache, if it is enabled.
    pub fn dynamic_cache(&self) -> Option<&DynamicSlots<'a>> {
        self.ops.dynamic.as_deref()
    }

    /// Replaces cached experts. Returns the number of completed exchanges; [`HotCache::events`] counts failed ones. An exchange has
    /// no effect if the expert to evict is not cached, or if the expert to add is cached already.
    pub fn exchange(&mut self, exchanges: &[Exchange]) -> usize {
        self.ops.exchange(self.model, exchanges)
    }
}
