//! A session of the executor, with the hot or dynamic cache of its options: ends the prompts and sequences of the cache, and writes
//! its results at the end.

use moe_engine::{BatchEntry, BatchSession, Decode, Error, Logits, Mode, Observer, Result};
#[cfg(feature = "serve")]
use moe_executor::DeviceId;
use moe_executor::Session;
#[cfg(feature = "serve")]
use moe_executor::hot_cache::HotCache;
use moe_placement::perf::{PerfMode, SharedCounters};
use moe_trace::{Phase, RunWriter, manifest};

use super::cache_run::CacheRun;

/// A session of the executor, with or without an expert cache.
pub struct NativeSession<'a, 'g> {
    session: Session<'a, 'g>,
    cache: Option<CacheRun>,
    /// Whether tokens were evaluated since the last end of a sequence.
    has_tokens: bool,
    /// Whether no token of the current sequence was generated yet.
    in_prompt: bool,
}

impl<'a, 'g> NativeSession<'a, 'g> {
    /// A session whose cache is built.
    pub fn new(session: Session<'a, 'g>, cache: Option<CacheRun>) -> NativeSession<'a, 'g> {
        NativeSession {
            session,
            cache,
            has_tokens: false,
            in_prompt: false,
        }
    }

    /// The memory of each hot lane of the cache: `gpu` or `ram`.
    #[cfg(feature = "serve")]
    pub fn hot_tiers(&self) -> Vec<&'static str> {
        let tier = |device: &DeviceId| match device {
            DeviceId::Cpu => "ram",
            DeviceId::Gpu(_) => "gpu",
        };
        let devices = self.session.hot_cache().map(HotCache::devices);
        devices.unwrap_or_default().iter().map(tier).collect()
    }

    /// Counts activations, if the session has no cache.
    ///
    /// # Errors
    /// The model has no experts to count.
    #[cfg(feature = "serve")]
    pub fn count_activations(&mut self, mode: PerfMode) -> Result<()> {
        if self.cache.is_none() {
            self.session.expert_cache().enable_hot_cache(&[], mode)?;
        }
        Ok(())
    }

    /// Ends a sequence of the cache, if it has tokens.
    fn end_sequence(&mut self, is_last: bool) {
        self.in_prompt = false;
        let has_tokens = std::mem::take(&mut self.has_tokens);
        if let Some(cache) = self.cache.as_mut().filter(|_| has_tokens) {
            cache.end_sequence(&mut self.session.expert_cache(), is_last);
        }
    }
}

impl Decode for NativeSession<'_, '_> {
    fn begin_sequence(&mut self, sequence_id: u32) {
        self.end_sequence(false);
        self.session.begin_sequence(sequence_id);
    }

    fn n_past(&self) -> usize {
        self.session.n_past()
    }

    fn n_ctx(&self) -> usize {
        Decode::n_ctx(&self.session)
    }

    fn n_ctx_train(&self) -> usize {
        self.session.n_ctx_train()
    }

    fn is_eog(&self, token: u32) -> bool {
        Decode::is_eog(&self.session, token)
    }

    fn has_room(&self, n_tokens: usize) -> bool {
        self.session.has_room(n_tokens)
    }

    fn decode(&mut self, tokens: &[u32], phase: Phase, logits: Logits) -> Result<&[f32]> {
        self.has_tokens = true;
        match phase {
            Phase::Prompt => self.in_prompt = true,
            Phase::Generate if std::mem::take(&mut self.in_prompt) => {
                if let Some(cache) = &mut self.cache {
                    cache.end_prompt(&mut self.session.expert_cache());
                }
            }
            Phase::Generate => {}
        }
        self.session.decode(tokens, phase, logits)
    }
}

impl moe_engine::Session for NativeSession<'_, '_> {
    fn stop_observing(&mut self) {
        self.session.stop_observing();
    }

    fn batches(&mut self) -> Option<&mut dyn BatchSession> {
        Some(self)
    }

    fn set_trace(&mut self, mode: Option<Mode>) -> Result<()> {
        self.session.set_trace(mode)
    }

    fn gpus(&self) -> Vec<manifest::Gpu> {
        moe_engine::Session::gpus(&self.session)
    }

    fn gpu_bandwidth(&self) -> Option<Result<f64>> {
        moe_engine::Session::gpu_bandwidth(&self.session)
    }

    fn hit_rate(&mut self) -> Option<f64> {
        self.end_sequence(false);
        let cache = self.cache.as_ref()?;
        cache.hit_rate(&self.session.expert_cache())
    }

    fn set_perf_mode(&mut self, mode: PerfMode) {
        self.end_sequence(false);
        BatchSession::set_perf_mode(self, mode);
    }

    fn into_writer(mut self: Box<Self>) -> (Option<RunWriter>, Result<()>) {
        self.end_sequence(true);
        let NativeSession {
            mut session, cache, ..
        } = *self;
        let results = cache.and_then(|cache| cache.finish(&session.expert_cache()));
        let (recorder, ended) = session.into_recorder();
        let mut writer = recorder.into_writer();
        let written = match (&mut writer, results) {
            (Some(writer), Some(results)) => results.write(writer),
            _ => Ok(()),
        };
        (
            writer,
            ended.map_err(Error::from).and(written.map_err(Error::from)),
        )
    }
}

impl BatchSession for NativeSession<'_, '_> {
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
        self.session.slot_len(slot)
    }

    fn begin_slot(&mut self, slot: usize, sequence_id: u32) -> Result<()> {
        self.session.begin_slot(slot, sequence_id)
    }

    fn truncate_slot(&mut self, slot: usize, n_past: usize) -> Result<()> {
        self.session.truncate_slot(slot, n_past)
    }

    fn decode_batch(&mut self, entries: &[BatchEntry]) -> Result<&[f32]> {
        self.session.decode_batch(entries)
    }

    fn set_observer(&mut self, observer: Option<Observer<'static>>) {
        self.session.set_observer(observer);
    }

    #[cfg(feature = "serve")]
    fn between_requests(&mut self) -> usize {
        let cache = self.cache.as_mut();
        cache.map_or(0, |cache| {
            cache.between_requests(&mut self.session.expert_cache())
        })
    }

    #[cfg(feature = "serve")]
    fn update_cache(
        &mut self,
        learn: &moe_placement::learn::LearnFile,
    ) -> Option<Result<moe_engine::CacheUpdate>> {
        let Some(CacheRun::Hot(run)) = &self.cache else {
            return None;
        };
        let planned = run.plan_update(self.session.hot_cache()?, learn);
        Some(match planned {
            Ok((update, exchanges)) => Ok(moe_engine::CacheUpdate {
                exchanged: self.session.expert_cache().exchange(&exchanges),
                ..update
            }),
            Err(error) => Err(super::boxed(error)),
        })
    }

    fn counters(&self) -> Option<SharedCounters> {
        self.session.counters()
    }

    fn set_perf_mode(&mut self, mode: PerfMode) {
        if let Some(counters) = self.session.counters() {
            counters.lock().set_mode(mode);
        }
        if let Some(CacheRun::Hot(run)) = &mut self.cache {
            run.set_mode(mode);
        }
    }
}
