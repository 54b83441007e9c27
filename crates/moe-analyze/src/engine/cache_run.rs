//! The hot or dynamic cache of the options, and its results.

use moe_executor::cpu::threads::Threads;
use moe_executor::hot_cache::ExpertCache;
use moe_placement::perf::Counters;
use moe_trace::RunWriter;

use super::device::DeviceArgs;
use super::dynamic::{DynamicResults, DynamicRun};
use super::hot_cache::{HotResults, HotRun, LaneBandwidths, Machine, PreparedCache};
use crate::context::Context;

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
    pub fn enable(self, expert_cache: &mut ExpertCache) -> anyhow::Result<CacheRun> {
        Ok(match self {
            PreparedCacheRun::Hot(prepared) => {
                CacheRun::Hot(Box::new(prepared.enable(expert_cache)?))
            }
            PreparedCacheRun::Dynamic(mut run) => {
                run.build(expert_cache)?;
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
    pub fn restart(&mut self, expert_cache: &mut ExpertCache) -> anyhow::Result<()> {
        match self {
            CacheRun::Hot(run) => run.restart(expert_cache),
            CacheRun::Dynamic(run) => run.restart(expert_cache),
        }
    }

    /// Ends the prompt of a sequence. A hot cache can exchange experts before the generated tokens.
    pub fn end_prompt(&mut self, expert_cache: &mut ExpertCache) {
        match self {
            CacheRun::Hot(run) => run.end_prompt(expert_cache),
            CacheRun::Dynamic(_) => {}
        }
    }

    /// Updates a hot cache by the activations since its last update, while several sequences are evaluated. Returns the number of
    /// exchanges.
    #[cfg(feature = "serve")]
    pub fn between_requests(&mut self, expert_cache: &mut ExpertCache) -> usize {
        match self {
            CacheRun::Hot(run) => run.between_requests(expert_cache),
            CacheRun::Dynamic(_) => 0,
        }
    }

    /// Ends a sequence. A hot cache can exchange experts before the next one.
    pub fn end_sequence(&mut self, expert_cache: &mut ExpertCache, is_last: bool) {
        match self {
            CacheRun::Hot(run) => run.end_sequence(expert_cache, is_last),
            CacheRun::Dynamic(_) => {}
        }
    }

    /// Fraction of the lookups so far that the cache has answered, 0.0 to 1.0; `None` without counts.
    pub fn hit_rate(&self, expert_cache: &ExpertCache) -> Option<f64> {
        match self {
            CacheRun::Hot(run) => run.hit_rate(),
            CacheRun::Dynamic(_) => expert_cache.dynamic_cache().and_then(DynamicRun::hit_rate),
        }
    }

    /// Prints the counts, and returns what a run directory stores. Call it after the last sequence.
    pub fn finish(self, expert_cache: &ExpertCache) -> Option<CacheResults> {
        let hot = expert_cache.hot_cache()?;
        Some(match self {
            CacheRun::Hot(run) => CacheResults::Hot(run.finish(hot)),
            CacheRun::Dynamic(run) => {
                CacheResults::Dynamic(run.finish(hot, expert_cache.dynamic_cache()?))
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
    pub fn write(self, writer: &mut RunWriter) -> Result<(), moe_trace::Error> {
        match self {
            CacheResults::Hot(results) => results.write(writer),
            CacheResults::Dynamic(results) => results.write(writer),
        }
    }
}
