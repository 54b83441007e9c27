//! A session with a dynamic cache: writes its counts at the end.

use moe_engine::{Decode, Error, Logits};
use moe_executor::Session;
use moe_trace::{Phase, RunWriter, manifest};

use super::DynamicRun;

/// A session of the executor with a dynamic cache.
pub struct DynamicSession<'a, 'g> {
    session: Session<'a, 'g>,
    run: DynamicRun,
}

impl<'a, 'g> DynamicSession<'a, 'g> {
    /// Builds the cache of `session`.
    ///
    /// # Errors
    /// The settings do not fit to the model.
    pub fn new(
        mut run: DynamicRun,
        mut session: Session<'a, 'g>,
    ) -> anyhow::Result<DynamicSession<'a, 'g>> {
        run.build(|params, mode| session.enable_dynamic_cache(params, mode))?;
        Ok(DynamicSession { session, run })
    }
}

impl Decode for DynamicSession<'_, '_> {
    fn begin_sequence(&mut self, sequence_id: u32) {
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
        self.session.decode(tokens, phase, logits)
    }
}

impl moe_engine::Session for DynamicSession<'_, '_> {
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
        self.session.dynamic_cache().and_then(DynamicRun::hit_rate)
    }

    fn into_writer(self: Box<Self>) -> (Option<RunWriter>, moe_engine::Result<()>) {
        let DynamicSession { session, run } = *self;
        let caches = session.hot_cache().zip(session.dynamic_cache());
        let results = caches.map(|(hot, slots)| run.finish(hot, slots));
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
