//! A hot cache in a replay of a trace: its requests are the sequences of the trace.

use anyhow::{Context as _, bail};
use moe_executor::replay::Replay;

use super::{HotCacheArgs, HotRun};
use crate::option_values::first_given;

impl HotCacheArgs {
    /// Rejects options that need a prompt.
    ///
    /// # Errors
    /// An option needs a prompt.
    pub fn check_replay(&self) -> anyhow::Result<()> {
        let option = first_given([
            ("--auto-learn", self.auto_learn),
            ("--warmup-prompt", self.has_warmup()),
        ]);
        match option {
            Some(option) => bail!(
                "{option} needs a prompt, but replay runs only the MoE layers; omit it, or use `record`"
            ),
            None => Ok(()),
        }
    }
}

impl HotRun {
    /// Starts the trace again: all counters at 0, and the planned experts in the cache.
    ///
    /// # Errors
    /// The cache cannot be built again.
    pub fn restart(&mut self, replay: &mut Replay) -> anyhow::Result<()> {
        if self.updates() {
            let report = replay.enable_hot_cache(&self.planned().lanes, self.mode());
            report.context("--hot-cache")?;
        }
        if let Some(cache) = replay.hot_cache() {
            cache.counters().lock().reset();
        }
        self.forget();
        Ok(())
    }

    /// Ends the prompt of a sequence. Its counters decide which experts the generated tokens have in the cache.
    pub fn end_replayed_prompt(&mut self, replay: &mut Replay) {
        let exchanges = replay.hot_cache().map(|cache| self.end_prompt(cache));
        let exchanges = exchanges.unwrap_or_default();
        if !exchanges.is_empty() {
            let done = replay.exchange(&exchanges);
            self.exchanged_after_prompt(done);
        }
    }

    /// Ends a sequence. Its counters decide which experts the next sequence has in the cache.
    pub fn end_sequence(&mut self, replay: &mut Replay, is_last: bool) {
        let Some(cache) = replay.hot_cache() else {
            return;
        };
        let exchanges = self.end_request(cache);
        if !is_last && !exchanges.is_empty() {
            let done = replay.exchange(&exchanges);
            self.exchanged(done);
        }
    }
}
