//! A session with a hot cache: updates the cache after sequences or their prompts, and writes its counters at the end.

use moe_engine::{Decode, Error, Logits};
use moe_executor::Session;
use moe_placement::perf::PerfMode;
use moe_trace::{Phase, RunWriter, manifest};

use super::HotRun;

/// A session of the executor with a hot cache.
pub struct HotSession<'a, 'g> {
    session: Session<'a, 'g>,
    run: HotRun,
    /// Whether a sequence has been evaluated since the last update.
    has_request: bool,
    /// Whether no token of the current sequence was generated yet.
    in_prompt: bool,
}

impl<'a, 'g> HotSession<'a, 'g> {
    /// A session whose cache is enabled.
    pub fn new(session: Session<'a, 'g>, run: HotRun) -> HotSession<'a, 'g> {
        HotSession {
            session,
            run,
            has_request: false,
            in_prompt: false,
        }
    }

    /// Ends the prompt of a sequence. Its counters decide which experts its generated tokens have in the cache.
    fn end_prompt(&mut self) {
        let cache = self.session.hot_cache();
        let exchanges = cache.map(|cache| self.run.end_prompt(cache));
        let exchanges = exchanges.unwrap_or_default();
        if !exchanges.is_empty() {
            let done = self.session.exchange(&exchanges);
            self.run.exchanged_after_prompt(done);
        }
    }

    /// Ends a sequence. Its counters decide which experts the next sequence has in the cache.
    fn end_sequence(&mut self, is_last: bool) {
        self.in_prompt = false;
        if !std::mem::take(&mut self.has_request) {
            return;
        }
        let Some(cache) = self.session.hot_cache() else {
            return;
        };
        let exchanges = self.run.end_request(cache);
        if !is_last && !exchanges.is_empty() {
            let done = self.session.exchange(&exchanges);
            self.run.exchanged(done);
        }
    }
}

impl Decode for HotSession<'_, '_> {
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
        self.has_request = true;
        match phase {
            Phase::Prompt => self.in_prompt = true,
            Phase::Generate if std::mem::take(&mut self.in_prompt) => self.end_prompt(),
            Phase::Generate => {}
        }
        self.session.decode(tokens, phase, logits)
    }
}

impl moe_engine::Session for HotSession<'_, '_> {
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
        self.run.hit_rate()
    }

    fn set_perf_mode(&mut self, mode: PerfMode) {
        self.end_sequence(false);
        self.run.set_mode(mode);
        if let Some(cache) = self.session.hot_cache() {
            cache.counters().lock().set_mode(mode);
        }
    }

    fn into_writer(mut self: Box<Self>) -> (Option<RunWriter>, moe_engine::Result<()>) {
        self.end_sequence(true);
        let HotSession { session, run, .. } = *self;
        let results = session.hot_cache().map(|cache| run.finish(cache));
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
