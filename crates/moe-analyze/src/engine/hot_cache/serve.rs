//! A hot cache of a server: updates while several sequences are evaluated.

use std::collections::BTreeSet;

use moe_engine::CacheUpdate;
use moe_executor::hot_cache::{ExpertCache, HotCache};
use moe_placement::learn::LearnFile;
use moe_placement::plan::rank;
use moe_placement::update::{Exchange, Update};

use super::HotRun;

impl HotRun {
    /// Updates the cache by the selections since the last update, while several sequences are evaluated. Returns the number of
    /// exchanges.
    pub fn between_requests(&mut self, expert_cache: &mut ExpertCache) -> usize {
        let Some(cache) = expert_cache.hot_cache().filter(|_| self.updates()) else {
            return 0;
        };
        let counters = cache.counters().lock().clone();
        let exchanges = self.exchanges(cache, &counters.since(&self.at_update));
        self.at_update = counters;
        if exchanges.is_empty() {
            return 0;
        }
        expert_cache.exchange(&exchanges)
    }

    /// Plans an update of the cache by a learn file, which may exchange all experts. Returns it without the number of exchanges
    /// that succeed, and the exchanges.
    ///
    /// # Errors
    /// The file is not valid.
    pub fn plan_update(
        &self,
        cache: &HotCache,
        learn: &LearnFile,
    ) -> anyhow::Result<(CacheUpdate, Vec<Exchange>)> {
        let ranking = rank(
            &learn.observations()?,
            self.planned.weighting,
            self.planned.curve,
        );
        let slots = learn.layer_slots().unwrap_or_default();
        let rate = 1.0;
        let update = Update::new(&cache.cached(), &ranking, &slots, self.n_expert, rate);
        let exchanges = update.exchanges().to_vec();
        let layers: BTreeSet<_> = exchanges.iter().map(|exchange| exchange.layer).collect();
        let planned = CacheUpdate {
            update_rate: rate,
            exchanged: 0,
            candidates: update.candidates.len(),
            max_exchange: update.max_exchange,
            hot_experts: update.hot_experts,
            layers_changed: layers.len(),
        };
        Ok((planned, exchanges))
    }
}
