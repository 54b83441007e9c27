//! The hot or dynamic cache of a session or a replay.

use moe_executor::cpu::threads::Threads;
use moe_executor::hot_cache::{
    DynamicParams, DynamicReport, DynamicSlots, HotCache, HotCacheReport, LaneContents,
};
use moe_executor::replay::Replay;
use moe_executor::{Result, Session};
use moe_placement::perf::{Counters, PerfMode};
use moe_placement::update::Exchange;
use moe_trace::RunWriter;

use super::device::DeviceArgs;
use super::dynamic::{DynamicResults, DynamicRun};
use super::hot_cache::{HotResults, HotRun, LaneBandwidths, Machine, PreparedCache};
use crate::context::Context;

/// A session or a replay: both can have a cache. [`Session`] documents the methods.
pub trait CacheOwner {
    fn enable_hot_cache(
        &mut self,
        lanes: &[LaneContents],
        mode: PerfMode,
    ) -> Result<HotCacheReport>;
    fn enable_dynamic_cache(
        &mut self,
        params: &DynamicParams,
        mode: PerfMode,
    ) -> Result<DynamicReport>;
    fn hot_cache(&self) -> Option<&HotCache>;
    fn dynamic_cache(&self) -> Option<&DynamicSlots<'_>>;
    fn exchange(&mut self, exchanges: &[Exchange]) -> usize;
}

impl CacheOwner for Session<'_, '_> {
    fn enable_hot_cache(
        &mut self,
        lanes: &[LaneContents],
        mode: PerfMode,
    ) -> Result<HotCacheReport> {
        self.enable_hot_cache(lanes, mode)
    }

    fn enable_dynamic_cache(
        &mut self,
        params: &DynamicParams,
        mode: PerfMode,
    ) -> Result<DynamicReport> {
        self.enable_dynamic_cache(params, mode)
    }

    fn hot_cache(&self) -> Option<&HotCache> {
        self.hot_cache()
    }

    fn dynamic_cache(&self) -> Option<&DynamicSlots<'_>> {
        self.dynamic_cache()
    }

    fn exchange(&mut self, exchanges: &[Exchange]) -> usize {
        self.exchange(exchanges)
    }
}

impl CacheOwner for Replay<'_, '_> {
    fn enable_hot_cache(
        &mut self,
        lanes: &[LaneContents],
        mode: PerfMode,
    ) -> Result<HotCacheReport> {
        self.enable_hot_cache(lanes, mode)
    }

    fn enable_dynamic_cache(
        &mut self,
        params: &DynamicParams,
        mode: PerfMode,
    ) -> Result<DynamicReport> {
        self.enable_dynamic_cache(params, mode)
    }

    fn hot_cache(&self) -> Option<&HotCache> {
        self.hot_cache()
    }

    fn dynamic_cache(&self) -> Option<&DynamicSlots<'_>> {
        self.dynamic_cache()
    }

    fn exchange(&mut self, exchanges: &[Exchange]) -> usize {
        self.exchange(exchanges)
    }
}

/// A cache before it is built.
pub enum PreparedCacheRun {
    Hot(Box<PreparedCache>),
    Dynamic(Box<DynamicRun>),
}

/// A cache while a run uses it.
pub enum CacheRun {
    Hot(Box<HotRun>),
    Dynamic(Box<DynamicRun>),
}

impl PreparedCacheRun {
    /// Plans the cache of the options; `None` without one. `warm_up` contains the counters of a warm-up prompt of a hot cache.
    ///
    /// # Errors
    /// The cache cannot have these settings.
    pub fn new(
        device: &DeviceArgs,
        machine: &Machine,
        warm_up: Option<Counters>,
        threads: &Threads,
        ctx: Context,
    ) -> anyhow::Result<Option<PreparedCacheRun>> {
        let size = &device.hot_cache;
        if device.has_hot_cache() {
            let measure = || LaneBandwidths::measure(threads, machine.devices, &ctx);
            let prepared = PreparedCache::new(size, machine, warm_up, measure, ctx)?;
            return Ok(Some(PreparedCacheRun::Hot(Box::new(prepared))));
        }
        if device.has_dynamic_cache() {
            let run = DynamicRun::new(&device.dynamic, size, machine, ctx)?;
            return Ok(Some(PreparedCacheRun::Dynamic(Box::new(run))));
        }
        Ok(None)
    }

    /// Builds the cache.
    ///
    /// # Errors
    /// The model or the devices do not have its contents.
    pub fn enable(self, owner: &mut impl CacheOwner) -> anyhow::Result<CacheRun> {
        Ok(match self {
            PreparedCacheRun::Hot(prepared) => CacheRun::Hot(Box::new(prepared.enable(owner)?)),
            PreparedCacheRun::Dynamic(mut run) => {
                run.build(owner)?;
                CacheRun::Dynamic(run)
            }
        })
    }
}

impl CacheRun {
    /// Starts the trace of a replay again, with the contents of the start and all counters at 0.
    ///
    /// # Errors
    /// The cache cannot be built again.
    pub fn restart(&mut self, owner: &mut impl CacheOwner) -> anyhow::Result<()> {
        match self {
            CacheRun::Hot(run) => run.restart(owner),
            CacheRun::Dynamic(run) => run.restart(owner),
        }
    }

    /// Ends the prompt of a sequence. A hot cache can exchange experts before the generated tokens.
    pub fn end_prompt(&mut self, owner: &mut impl CacheOwner) {
        match self {
            CacheRun::Hot(run) => run.end_prompt(owner),
            CacheRun::Dynamic(_) => {}
        }
    }

    /// Updates a hot cache by the activations since its last update, while several sequences are evaluated. Returns the number of
    /// exchanges.
    #[cfg(feature = "serve")]
    pub fn between_requests(&mut self, owner: &mut impl CacheOwner) -> usize {
        match self {
            CacheRun::Hot(run) => run.between_requests(owner),
            CacheRun::Dynamic(_) => 0,
        }
    }

    /// Ends a sequence. A hot cache can exchange experts before the next one.
    pub fn end_sequence(&mut self, owner: &mut impl CacheOwner, is_last: bool) {
        match self {
            CacheRun::Hot(run) => run.end_sequence(owner, is_last),
            CacheRun::Dynamic(_) => {}
        }
    }

    /// Fraction of the lookups so far that the cache has answered, 0.0 to 1.0; `None` without counts.
    pub fn hit_rate(&self, owner: &impl CacheOwner) -> Option<f64> {
        match self {
            CacheRun::Hot(run) => run.hit_rate(),
            CacheRun::Dynamic(_) => owner.dynamic_cache().and_then(DynamicRun::hit_rate),
        }
    }

    /// Prints the counts, and returns what a run directory stores. Call it after the last sequence.
    pub fn finish(self, owner: &impl CacheOwner) -> Option<CacheResults> {
        let hot = owner.hot_cache()?;
        Some(match self {
            CacheRun::Hot(run) => CacheResults::Hot(run.finish(hot)),
            CacheRun::Dynamic(run) => {
                CacheResults::Dynamic(run.finish(hot, owner.dynamic_cache()?))
            }
        })
    }
}

/// What a run directory stores of a cache.
pub enum CacheResults {
    Hot(HotResults),
    Dynamic(DynamicResults),
}

impl CacheResults {
    /// Writes perf.json, and the description of the cache to the manifest.
    ///
    /// # Errors
    /// perf.json cannot be written. The writer reports the error again when it completes the run.
    pub fn write(self, writer: &mut RunWriter) -> std::result::Result<(), moe_trace::Error> {
        match self {
            CacheResults::Hot(results) => results.write(writer),
            CacheResults::Dynamic(results) => results.write(writer),
        }
    }
}
