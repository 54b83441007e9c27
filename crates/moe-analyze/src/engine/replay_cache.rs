//! The hot or dynamic cache of a replay.

use moe_executor::cpu::threads::Threads;
use moe_executor::replay::Replay;
use moe_trace::RunWriter;

use super::device::DeviceArgs;
use super::dynamic::{DynamicResults, DynamicRun};
use super::hot_cache::{HotResults, HotRun, LaneBandwidths, Machine, PreparedCache};
use crate::context::Context;

/// The cache of a replay, before it is built.
pub enum PreparedReplayCache {
    Hot(Box<PreparedCache>),
    Dynamic(Box<DynamicRun>),
}

/// The cache of a replay.
pub enum ReplayCache {
    Hot(Box<HotRun>),
    Dynamic(Box<DynamicRun>),
}

impl PreparedReplayCache {
    /// Plans the cache of the options; `None` without one.
    ///
    /// # Errors
    /// The cache cannot have these settings.
    pub fn new(
        device: &DeviceArgs,
        machine: &Machine,
        threads: &Threads,
        ctx: Context,
    ) -> anyhow::Result<Option<PreparedReplayCache>> {
        let size = &device.hot_cache;
        if device.has_hot_cache() {
            let measure = || LaneBandwidths::measure(threads, machine.devices, &ctx);
            let prepared = PreparedCache::new(size, machine, None, measure, ctx)?;
            return Ok(Some(PreparedReplayCache::Hot(Box::new(prepared))));
        }
        if device.has_dynamic_cache() {
            let run = DynamicRun::new(&device.dynamic, size, machine, ctx)?;
            return Ok(Some(PreparedReplayCache::Dynamic(Box::new(run))));
        }
        Ok(None)
    }

    /// Builds the cache.
    ///
    /// # Errors
    /// The model or the devices do not have its contents.
    pub fn enable(self, replay: &mut Replay) -> anyhow::Result<ReplayCache> {
        Ok(match self {
            PreparedReplayCache::Hot(prepared) => {
                ReplayCache::Hot(Box::new(prepared.enable_replay(replay)?))
            }
            PreparedReplayCache::Dynamic(mut run) => {
                run.build(|params, mode| replay.enable_dynamic_cache(params, mode))?;
                ReplayCache::Dynamic(run)
            }
        })
    }
}

impl ReplayCache {
    /// Starts the trace again, with the contents of the start and all counters at 0.
    ///
    /// # Errors
    /// The cache cannot be built again.
    pub fn restart(&mut self, replay: &mut Replay) -> anyhow::Result<()> {
        match self {
            ReplayCache::Hot(run) => run.restart(replay),
            ReplayCache::Dynamic(run) => run.restart(replay),
        }
    }

    /// Ends the prompt of a sequence. A hot cache can exchange experts before the generated tokens.
    pub fn end_prompt(&mut self, replay: &mut Replay) {
        match self {
            ReplayCache::Hot(run) => run.end_replayed_prompt(replay),
            ReplayCache::Dynamic(_) => {}
        }
    }

    /// Ends a sequence. A hot cache can exchange experts before the next one.
    pub fn end_sequence(&mut self, replay: &mut Replay, is_last: bool) {
        match self {
            ReplayCache::Hot(run) => run.end_sequence(replay, is_last),
            ReplayCache::Dynamic(_) => {}
        }
    }

    /// Prints the counts of the last run over the trace, and returns what a run directory stores.
    pub fn finish(self, replay: &Replay) -> Option<CacheResults> {
        let hot = replay.hot_cache()?;
        Some(match self {
            ReplayCache::Hot(run) => CacheResults::Hot(run.finish(hot)),
            ReplayCache::Dynamic(run) => {
                CacheResults::Dynamic(run.finish(hot, replay.dynamic_cache()?))
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
