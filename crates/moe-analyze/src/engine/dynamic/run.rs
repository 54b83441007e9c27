//! A dynamic cache while a run uses it.

use anyhow::Context as _;
use moe_executor::hot_cache::{DynamicParams, DynamicSlots, ExpertCache, HotCache};
use moe_files::text::counted;
use moe_placement::dynamic;
use moe_placement::perf::PerfMode;
use moe_trace::RunWriter;
use moe_trace::dynamic_cache::{Counts, DynamicCache, Failures, Prefetch};

use super::DynamicArgs;
use crate::context::Context;
use crate::engine::hot_cache::{HotCacheArgs, Machine};
use crate::output::human_bytes;

/// The dynamic cache of a run.
pub struct DynamicRun {
    params: DynamicParams,
    mode: PerfMode,
    /// Description for the manifest, without what is known only at the end of the run.
    manifest: DynamicCache,
    ctx: Context,
}

impl DynamicRun {
    /// A cache with the settings of the options, not yet built.
    ///
    /// # Errors
    /// A setting is invalid, or the model cannot be described.
    pub fn new(
        args: &DynamicArgs,
        size: &HotCacheArgs,
        machine: &Machine,
        ctx: Context,
    ) -> anyhow::Result<DynamicRun> {
        let params = args.params(size, machine, &ctx)?;
        let (settings, mode) = (&params.settings, size.perf()?);
        Ok(DynamicRun {
            manifest: DynamicCache {
                policy: settings.policy.to_string(),
                predictor: settings.predictor.map(|name| name.to_string()),
                depth: settings.depth as u64,
                n_predict: settings.n_predict.map(|n| n as u64),
                device: params.device.to_string(),
                budget_bytes: settings.budget_bytes,
                perf: mode.name().into(),
                ..DynamicCache::default()
            },
            params,
            mode,
            ctx,
        })
    }

    /// Builds the cache, and prints what was allocated.
    ///
    /// # Errors
    /// The settings do not fit to the model.
    pub fn build(&mut self, expert_cache: &mut ExpertCache) -> anyhow::Result<()> {
        let report = expert_cache.enable_dynamic_cache(&self.params, self.mode);
        let report = report.context("--policy dynamic")?;
        let [n_slots, n_prefetch] = report.n_slots.map(|n| n as u64);
        let manifest = &mut self.manifest;
        (manifest.n_slots, manifest.n_prefetch_slots) = (n_slots, n_prefetch);
        manifest.bytes = report.bytes;
        let (device, bytes) = (&manifest.device, human_bytes(report.bytes));
        let slots = counted(n_slots, "slot");
        self.ctx.note(match (n_slots, n_prefetch) {
            (0, 0) => format!("dynamic cache: no slots on {device}, so no expert is cached"),
            (_, 0) => format!("dynamic cache: {slots} on {device}, {bytes}"),
            (_, n) => {
                format!(
                    "dynamic cache: {slots} and {n} for prefetched experts on {device}, {bytes}"
                )
            }
        });
        if let Some(first) = report.dropped.first() {
            self.ctx.note(format_args!(
                "warning: {} not cached, so the CPU computes their experts; first reason, layer {}: {}",
                match report.dropped.len() {
                    1 => "1 layer is".to_owned(),
                    n => format!("{n} layers are"),
                },
                first.layer,
                first.reason
            ));
        }
        Ok(())
    }

    /// Starts the trace of a replay again, with an empty cache and all counts at 0.
    ///
    /// # Errors
    /// The cache cannot be built again.
    pub fn restart(&mut self, expert_cache: &mut ExpertCache) -> anyhow::Result<()> {
        let report = expert_cache.enable_dynamic_cache(&self.params, self.mode);
        report.context("--policy dynamic").map(drop)
    }

    /// Fraction of the lookups so far that the cache has answered, 0.0 to 1.0; `None` without lookups.
    pub fn hit_rate(slots: &DynamicSlots) -> Option<f64> {
        let counts = slots.counts();
        let look_ups: u64 = counts.look_ups.iter().sum();
        let hits: u64 = counts.hits.iter().sum();
        (look_ups > 0).then(|| hits as f64 / look_ups as f64)
    }

    /// Prints the counts, and returns what a run directory stores. Call it after the last request.
    pub fn finish(self, hot: &HotCache, slots: &DynamicSlots) -> DynamicResults {
        let events = hot.events();
        let counts = slots.counts();
        let failures = Failures {
            layers: events.dropped_layers,
            calls: events.failed_calls,
            copies: counts.failed_copies,
            first_error: events.first_failure.clone(),
        };
        if let Some(hit_rate) = DynamicRun::hit_rate(slots) {
            let look_ups = counts.look_ups.iter().sum();
            self.ctx.note(format_args!(
                "dynamic cache: {:.1} % of {} hit; {} evicted",
                100.0 * hit_rate,
                counted::<u64>(look_ups, "lookup"),
                counted(counts.evictions, "expert")
            ));
        }
        let counts = describe(&counts);
        if let Some(prefetch) = &counts.prefetch {
            self.ctx.note(format_args!(
                "prefetched experts: {} timely, {} late, {} wasted; {} not prefetched",
                prefetch.timely,
                prefetch.late,
                prefetch.wasted,
                counted(prefetch.missed, "miss")
            ));
        }
        if let (Some(error), 1..) = (&failures.first_error, failures.calls + failures.copies) {
            self.ctx.note(format_args!(
                "warning: the CPU ran {} of the dynamic cache, and {} failed; first error: {error}",
                counted(failures.calls, "call"),
                match failures.copies {
                    1 => "1 copy".to_owned(),
                    n => format!("{n} copies"),
                }
            ));
        }
        DynamicResults {
            manifest: DynamicCache {
                counts: Some(counts),
                failures: Some(failures),
                ..self.manifest
            },
            report: hot.counters().lock().to_learn_file().to_json(),
        }
    }
}

/// The counts of a cache for the manifest.
fn describe(counts: &dynamic::Counts) -> Counts {
    let loads = counts.prefetch;
    let prefetch = counts.predictions.map(|predictions| Prefetch {
        timely: loads.timely,
        late: loads.late,
        missed: loads.missed,
        wasted: predictions.wasted,
        predicted: predictions.predicted,
        correct: predictions.correct,
        moved_bytes: loads.moved_bytes,
    });
    Counts {
        look_ups: counts.look_ups,
        hits: counts.hits,
        missed_bytes: counts.missed_bytes,
        evictions: counts.evictions,
        without_slot: counts.without_slot,
        prefetch,
    }
}

/// What a run directory stores of a dynamic cache.
pub struct DynamicResults {
    manifest: DynamicCache,
    /// Text of perf.json.
    report: String,
}

impl DynamicResults {
    /// Writes perf.json, and the description of the cache to the manifest.
    ///
    /// # Errors
    /// perf.json cannot be written. The writer reports the error again when it completes the run.
    pub fn write(self, writer: &mut RunWriter) -> Result<(), moe_trace::Error> {
        writer.manifest_mut().dynamic_cache = Some(self.manifest);
        writer.write_perf(&self.report)
    }
}
