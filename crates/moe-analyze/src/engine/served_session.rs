//! The session of `serve`: several sequences, with or without an expert cache.

use moe_engine::{BatchEntry, BatchSession, CacheUpdate, Observer, Result};
use moe_executor::Session;
use moe_executor::hot_cache::HotCache;
use moe_executor::placement::DeviceId;
use moe_placement::learn::LearnFile;
use moe_placement::perf::{PerfMode, SharedCounters};

use super::boxed;
use super::cache_run::CacheRun;

/// A session of the executor with slots.
pub struct ServedSession<'a, 'g> {
    session: Session<'a, 'g>,
    cache: Option<CacheRun>,
}

impl<'a, 'g> ServedSession<'a, 'g> {
    /// A session whose cache is built. Without a cache, the session must count activations.
    pub fn new(session: Session<'a, 'g>, cache: Option<CacheRun>) -> ServedSession<'a, 'g> {
        ServedSession { session, cache }
    }
}

impl ServedSession<'_, '_> {
    /// The memory of each hot lane of the cache: `gpu` or `ram`.
    pub fn hot_tiers(&self) -> Vec<&'static str> {
        let tier = |device: &DeviceId| match device {
            DeviceId::Cpu => "ram",
            DeviceId::Gpu(_) => "gpu",
        };
        let devices = self.session.hot_cache().map(HotCache::devices);
        devices.unwrap_or_default().iter().map(tier).collect()
    }
}

impl BatchSession for ServedSession<'_, '_> {
    fn n_slots(&self) -> usize {
        BatchSession::n_slots(&self.session)
    }

    fn n_ctx(&self) -> usize {
        BatchSession::n_ctx(&self.session)
    }

    fn n_vocab(&self) -> usize {
        self.session.n_vocab()
    }

    fn is_eog(&self, token: u32) -> bool {
        BatchSession::is_eog(&self.session, token)
    }

    fn slot_len(&self, slot: usize) -> Result<usize> {
        BatchSession::slot_len(&self.session, slot)
    }

    fn begin_slot(&mut self, slot: usize, sequence_id: u32) -> Result<()> {
        self.session.begin_slot(slot, sequence_id)
    }

    fn truncate_slot(&mut self, slot: usize, n_past: usize) -> Result<()> {
        BatchSession::truncate_slot(&mut self.session, slot, n_past)
    }

    fn decode_batch(&mut self, entries: &[BatchEntry]) -> Result<&[f32]> {
        BatchSession::decode_batch(&mut self.session, entries)
    }

    fn set_observer(&mut self, observer: Option<Observer<'static>>) {
        self.session.set_observer(observer);
    }

    fn between_requests(&mut self) -> usize {
        let cache = self.cache.as_mut();
        cache.map_or(0, |cache| cache.between_requests(&mut self.session))
    }

    fn update_cache(&mut self, learn: &LearnFile) -> Option<Result<CacheUpdate>> {
        let Some(CacheRun::Hot(run)) = &self.cache else {
            return None;
        };
        let planned = run.plan_update(self.session.hot_cache()?, learn);
        Some(match planned {
            Ok((update, exchanges)) => Ok(CacheUpdate {
                exchanged: self.session.exchange(&exchanges),
                ..update
            }),
            Err(error) => Err(boxed(error)),
        })
    }

    fn counters(&self) -> Option<SharedCounters> {
        self.session.counters()
    }

    fn set_perf_mode(&mut self, mode: PerfMode) {
        if let Some(counters) = self.session.counters() {
            let mut counters = counters.lock();
            counters.set_mode(mode);
            counters.reset();
        }
        if let Some(cache) = &mut self.cache {
            cache.set_mode(&self.session, mode);
        }
    }
}
