//! A cache that is planned, and not yet built.

use std::time::Instant;

use anyhow::{Context as _, bail};
use moe_executor::hot_cache::ExpertCache;
use moe_placement::learn::is_usable;
use moe_placement::perf::Counters;

use super::HotCacheArgs;
use super::plan::{Machine, Planned};
use super::run::{HotRun, LaneBandwidths};
use crate::context::Context;
use crate::files;

/// A planned cache, and the counters of the warm-up prompt.
pub struct PreparedCache {
    run: HotRun,
    /// Counters of a warm-up prompt whose activations update the cache; `None` if the cache is planned from them.
    warm_up: Option<Counters>,
}

impl PreparedCache {
    /// Plans a cache. With `--auto-learn`, it is planned from the counters of the warm-up prompt if the learn file
    /// does not exist.
    ///
    /// # Errors
    /// Those of [`Planned::read`]; the learn file cannot be written.
    pub fn new(
        args: &HotCacheArgs,
        machine: &Machine,
        warm_up: Option<Counters>,
        measure: impl FnOnce() -> LaneBandwidths,
        ctx: Context,
    ) -> anyhow::Result<PreparedCache> {
        let must_learn = args.must_learn();
        let (planned, warm_up) = match (warm_up, &args.hot_cache) {
            (Some(counters), Some(path)) if must_learn => {
                let report = counters.to_learn_file();
                let observations = report.observations()?;
                if !is_usable(&observations) {
                    bail!("the warm-up prompt has no tokens; pass a longer prompt");
                }
                files::write(path, false, |file| {
                    use std::io::Write as _;
                    Ok(file.write_all(report.to_json().as_bytes())?)
                })?;
                ctx.note(format_args!(
                    "wrote {} from the warm-up prompt",
                    path.display()
                ));
                let mut planned = Planned::of_learn(args, &observations, machine, &ctx)?;
                planned.manifest.kind = "auto-learn".into();
                planned.manifest.source = path.display().to_string();
                (planned, None)
            }
            (warm_up, _) => (Planned::read(args, machine, &ctx)?, warm_up),
        };
        let hp = machine.model.hparams();
        let used = hp.n_expert_used_by_layer.iter().copied().max();
        let numbers = [hp.n_expert, used.unwrap_or(hp.n_expert_used)];
        Ok(PreparedCache {
            run: HotRun::new(args, planned, numbers, measure, ctx)?,
            warm_up,
        })
    }

    /// Builds the cache, and exchanges experts by the counters of the warm-up prompt.
    ///
    /// # Errors
    /// The model or the devices do not have the contents of the plan.
    pub fn enable(mut self, expert_cache: &mut ExpertCache) -> anyhow::Result<HotRun> {
        let started = Instant::now();
        let lanes = &self.run.planned().lanes;
        let report = expert_cache.enable_hot_cache(lanes, self.run.mode());
        let report = report.context("--hot-cache")?;
        self.run.built(&report, started.elapsed());
        let cache = expert_cache.hot_cache();
        if let (Some(warm_up), Some(cache), true) = (&self.warm_up, cache, self.run.updates()) {
            let exchanges = self.run.exchanges(cache, warm_up);
            expert_cache.exchange(&exchanges);
        }
        Ok(self.run)
    }
}
