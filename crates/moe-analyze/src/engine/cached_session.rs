//! A session with a hot or dynamic cache: ends the prompts and sequences of the cache, and writes its results at the end.

use moe_engine::{Decode, Error, Logits};
use moe_executor::Session;
use moe_placement::perf::PerfMode;
use moe_trace::{Phase, RunWriter, manifest};

use super::cache_run::CacheRun;

/// A session of the executor with a cache.
pub struct CachedSession<'a, 'g> {
    session: Session<'a, 'g>,
    cache: CacheRun,
    /// Whether tokens were evaluated since the last end of a sequence.
    has_tokens: bool,
    /// Whether no token of the current sequence was generated yet.
    in_prompt: bool,
}

impl<'a, 'g> CachedSession<'a, 'g> {
    /// A session whose cache is built.
    pub fn new(session: Session<'a, 'g>, cache: CacheRun) -> CachedSession<'a, 'g> {
        CachedSession {
            session,
            cache,
            has_tokens: false,
            in_prompt: false,
        }
    }

    /// Ends a sequence of the cache, if it has tokens.
    fn end_sequence(&mut self, is_last: bool) {
        self.in_prompt = false;
        if std::mem::take(&mut self.has_tokens) {
            self.cache.end_sequence(&mut self.session, is_last);
        }
    }
}

impl Decode for CachedSession<'_, '_> {
    fn begin_sequence(&mut self, sequence_id: u32) {
        self.end_sequence(false);
        self.session.begin_sequence(sequence_id);
    }

    fn n_past(&self) -> usize {
        self.session.n_past()
    }

    fn n_ctx(&self) -> usize {
        self.session.n_ctx()
    }

    fn n_ctx_train(&self) -> usize {
        self.session.n_ctx_train()
    }

    fn is_eog(&self, token: u32) -> bool {
        self.session.is_eog(token)
    }

    fn has_room(&self, n_tokens: usize) -> bool {
        self.session.has_room(n_tokens)
    }

    fn decode(
        &mut self,
        tokens: &[u32],
        phase: Phase,
        logits: Logits,
    ) -> moe_engine::Result<&[f32]> {
        self.has_tokens = true;
        match phase {
            Phase::Prompt => self.in_prompt = true,
            Phase::Generate if std::mem::take(&mut self.in_prompt) => {
                self.cache.end_prompt(&mut self.session);
            }
            Phase::Generate => {}
        }
        self.session.decode(tokens, phase, logits)
    }
}

impl moe_engine::Session for CachedSession<'_, '_> {
    fn stop_observing(&mut self) {
        self.session.stop_observing();
    }

    fn gpus(&self) -> Vec<manifest::Gpu> {
        moe_engine::Session::gpus(&self.session)
    }

    fn gpu_bandwidth(&self) -> Option<moe_engine::Result<f64>> {
        moe_engine::Session::gpu_bandwidth(&self.session)
    }

    fn hit_rate(&mut self) -> Option<f64> {
        self.end_sequence(false);
        self.cache.hit_rate(&self.session)
    }

    fn set_perf_mode(&mut self, mode: PerfMode) {
        self.end_sequence(false);
        self.cache.set_mode(&self.session, mode);
    }

    fn into_writer(mut self: Box<Self>) -> (Option<RunWriter>, moe_engine::Result<()>) {
        self.end_sequence(true);
        let CachedSession { session, cache, .. } = *self;
        let results = cache.finish(&session);
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
