//! A hot cache while a run uses it: counters of all requests, and exchanges after each of them.

use std::time::Duration;

use anyhow::Context as _;
use moe_executor::Devices;
use moe_executor::cpu::bandwidth::read_bandwidth;
use moe_executor::cpu::threads::Threads;
use moe_executor::hot_cache::{ExpertCache, HotCache, HotCacheReport};
use moe_files::text::counted;
use moe_placement::learn::{LayerCounts, LayerObservation};
use moe_placement::perf::{Counters, PerfMode};
use moe_placement::plan::rank;
use moe_placement::update::{Exchange, Payback, Update};
use moe_trace::hot_cache::{HotFailures, HotRequest};
use moe_trace::{RunWriter, hot_cache};

use super::plan::Planned;
use super::{HotCacheArgs, UpdateAfter, UpdatePolicy};
use crate::context::Context;
use crate::engine::native::{BANDWIDTH_BYTES, gpu_bandwidth};
use crate::output::human_bytes;

/// A hot cache of a run.
pub struct HotRun {
    pub(super) planned: Planned,
    policy: UpdatePolicy,
    rate: f64,
    after: UpdateAfter,
    /// Number of experts exchanged after the prompt of the current request.
    after_prompt: usize,
    /// Which exchanges pay; `None` for other policies.
    payback: Option<Payback>,
    mode: PerfMode,
    pub(super) n_expert: u64,
    n_expert_used: u32,
    /// Counters of the completed requests of a run directory.
    total: Counters,
    /// Counters at the last update of a server, whose requests overlap.
    #[cfg(feature = "serve")]
    pub(super) at_update: Counters,
    requests: Vec<HotRequest>,
    ctx: Context,
}

/// Measured bandwidths in bytes/s of the memory of the CPU and of the first lane.
pub struct LaneBandwidths {
    pub cold: f64,
    /// `None` if the lanes are on the CPU.
    pub hot: Option<f64>,
}

impl LaneBandwidths {
    /// Measures the memory of the CPU and of the first GPU.
    pub fn measure(threads: &Threads, devices: &Devices, ctx: &Context) -> LaneBandwidths {
        let gpu = devices.gpus().first();
        LaneBandwidths {
            cold: read_bandwidth(threads, BANDWIDTH_BYTES),
            hot: gpu.and_then(|gpu| gpu_bandwidth(gpu.bandwidth(), ctx)),
        }
    }
}

impl HotRun {
    /// A run with a planned cache. `measure` is called if updates need bandwidths that were not given.
    pub fn new(
        args: &HotCacheArgs,
        planned: Planned,
        [n_expert, n_expert_used]: [usize; 2],
        measure: impl FnOnce() -> LaneBandwidths,
        ctx: Context,
    ) -> anyhow::Result<HotRun> {
        let (mode, policy) = (args.perf()?, args.update_policy());
        let payback = (policy == UpdatePolicy::Payback).then(|| {
            let (horizon, given) = args.payback();
            given.unwrap_or_else(|| {
                let LaneBandwidths { cold, hot } = measure();
                // The upload is measured when the cache is built.
                let upload = f64::INFINITY;
                Payback {
                    horizon,
                    cold,
                    hot: hot.unwrap_or(cold),
                    upload,
                }
            })
        });
        if policy == UpdatePolicy::Fork && args.update_rate() > 0.0 && planned.lanes.len() > 1 {
            ctx.note("warning: with several lanes, no expert is exchanged, as in the fork; use --update-policy payback");
        }
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let total = Counters::new(mode, number(n_expert), number(n_expert_used));
        Ok(HotRun {
            policy,
            rate: args.update_rate(),
            after: args.update_after(),
            after_prompt: 0,
            payback,
            mode,
            n_expert: n_expert as u64,
            n_expert_used: number(n_expert_used),
            #[cfg(feature = "serve")]
            at_update: total.clone(),
            total,
            requests: Vec::new(),
            planned,
            ctx,
        })
    }

    /// The planned cache.
    pub fn planned(&self) -> &Planned {
        &self.planned
    }

    /// What is counted.
    pub fn mode(&self) -> PerfMode {
        self.mode
    }

    /// Changes what is counted.
    pub fn set_mode(&mut self, mode: PerfMode) {
        self.mode = mode;
    }

    /// Whether experts may be exchanged.
    pub fn updates(&self) -> bool {
        self.rate > 0.0 && (self.policy == UpdatePolicy::Payback || self.planned.lanes.len() < 2)
    }

    /// Stores and prints what was allocated. `time` is how long the copies took.
    pub fn built(&mut self, report: &HotCacheReport, time: Duration) {
        let lanes = self.planned.manifest.lanes.iter_mut();
        for (lane, &bytes) in lanes.zip(&report.lane_bytes) {
            lane.bytes = bytes;
        }
        let bytes = report.lane_bytes.iter().sum::<u64>();
        if let Some(payback) = &mut self.payback
            && payback.upload.is_infinite()
            && bytes > 0
        {
            payback.upload = bytes as f64 / time.as_secs_f64().max(1e-9);
        }
        for (number, lane) in self.planned.manifest.lanes.iter().enumerate() {
            let experts = lane.experts.values().map(Vec::len).sum::<usize>();
            self.ctx.note(format_args!(
                "hot cache, lane {number}: {} in {} on {}, {}",
                counted(experts, "expert"),
                counted(lane.experts.len(), "layer"),
                lane.device,
                human_bytes(lane.bytes)
            ));
        }
        for warning in warnings(report) {
            self.ctx.note(warning);
        }
    }

    /// Starts the trace of a replay again: all counters at 0, and the planned experts in the cache.
    ///
    /// # Errors
    /// The cache cannot be built again.
    pub fn restart(&mut self, expert_cache: &mut ExpertCache) -> anyhow::Result<()> {
        if self.updates() {
            let report = expert_cache.enable_hot_cache(&self.planned.lanes, self.mode);
            report.context("--hot-cache")?;
        }
        if let Some(cache) = expert_cache.hot_cache() {
            cache.counters().lock().reset();
        }
        self.total.reset();
        self.requests.clear();
        Ok(())
    }

    /// Ends the prompt of a sequence. Its counters can decide which experts the generated tokens have in the cache.
    pub fn end_prompt(&mut self, expert_cache: &mut ExpertCache) {
        let Some(cache) = expert_cache.hot_cache() else {
            return;
        };
        if !self.updates() || self.after != UpdateAfter::Prompt {
            return;
        }
        let prompt = cache.counters().lock().clone();
        let exchanges = self.exchanges(cache, &prompt);
        if !exchanges.is_empty() {
            self.after_prompt = expert_cache.exchange(&exchanges);
        }
    }

    /// Ends a sequence. Its counters can decide which experts the next sequence has in the cache.
    pub fn end_sequence(&mut self, expert_cache: &mut ExpertCache, is_last: bool) {
        let Some(cache) = expert_cache.hot_cache() else {
            return;
        };
        let exchanges = self.end_request(cache);
        if !is_last && !exchanges.is_empty() {
            let done = expert_cache.exchange(&exchanges);
            if let Some(last) = self.requests.last_mut() {
                last.exchanged = done as u64;
            }
        }
    }

    /// Adds the counters of a sequence to the total, and returns the exchanges to make before the next sequence.
    fn end_request(&mut self, cache: &HotCache) -> Vec<Exchange> {
        let request = {
            let mut counters = cache.counters().lock();
            let request = counters.clone();
            counters.reset();
            request
        };
        if self.mode == PerfMode::Off {
            return Vec::new();
        }
        self.total.add(&request);
        self.requests.push(HotRequest {
            hot_slots: request.hot_slots(),
            cold_slots: request.cold_slots(),
            exchanged: std::mem::take(&mut self.after_prompt) as u64,
        });
        if self.updates() && self.after == UpdateAfter::Request {
            self.exchanges(cache, &request)
        } else {
            Vec::new()
        }
    }

    /// Returns the exchanges that an update by `request` makes.
    pub fn exchanges(&self, cache: &HotCache, request: &Counters) -> Vec<Exchange> {
        let report = request.to_learn_file();
        let observations = report.observations().unwrap_or_default();
        let ranking = rank(&observations, self.planned.weighting, self.planned.curve);
        let slots = report.layer_slots().unwrap_or_default();
        let update = Update::new(&cache.cached(), &ranking, &slots, self.n_expert, self.rate);
        let Some(payback) = &self.payback else {
            return update.exchanges().to_vec();
        };
        let n_tokens = self.n_tokens(&observations);
        update.paying(payback, &observations, n_tokens, |layer, expert| {
            self.planned.sizes.get(layer, expert).unwrap_or(0)
        })
    }

    /// Number of tokens of a request: selections of the layer with the most, by selections of a token.
    fn n_tokens(&self, observations: &[LayerObservation]) -> u64 {
        let selections = observations.iter().map(|layer| {
            let hits = layer.experts.iter().map(|expert| expert.hits());
            hits.fold(0, u64::saturating_add)
        });
        LayerCounts::tokens_of(selections.max().unwrap_or(0), self.n_expert_used)
    }

    /// Fraction of the expert slots that hot lanes computed, 0.0 to 1.0; `None` without counts.
    pub fn hit_rate(&self) -> Option<f64> {
        self.total.hit_rate()
    }

    /// Prints the hit rate and failures, and returns what a run directory stores. Call it after the last request.
    pub fn finish(self, cache: &HotCache) -> HotResults {
        self.print(cache);
        HotResults {
            manifest: hot_cache::HotCache {
                requests: self.requests,
                failures: Some(failures(cache)),
                ..self.planned.manifest
            },
            report: self.total.to_learn_file().to_json(),
        }
    }

    fn print(&self, cache: &HotCache) {
        let exchanged: u64 = self.requests.iter().map(|request| request.exchanged).sum();
        if let Some(hit_rate) = self.total.hit_rate() {
            let slots = self
                .total
                .hot_slots()
                .saturating_add(self.total.cold_slots());
            self.ctx.note(format_args!(
                "hot cache: {:.1} % of {} computed by hot lanes; {} exchanged",
                100.0 * hit_rate,
                counted(slots, "activation"),
                counted(exchanged, "expert")
            ));
        }
        let failures = failures(cache);
        if let (Some(error), 1..) = (&failures.first_error, failures.calls + failures.exchanges) {
            self.ctx.note(format_args!(
                "warning: the CPU ran {} of hot lanes, and {} not be exchanged; first error: {error}",
                counted(failures.calls, "call"),
                match failures.exchanges {
                    1 => "1 expert could".to_owned(),
                    n => format!("{n} experts could"),
                }
            ));
        }
    }
}

/// What a run directory stores of a hot cache.
pub struct HotResults {
    manifest: hot_cache::HotCache,
    /// Text of perf.json.
    report: String,
}

impl HotResults {
    /// Writes perf.json, and the description of the cache to the manifest.
    ///
    /// # Errors
    /// perf.json cannot be written. The writer reports the error again when it completes the run.
    pub fn write(self, writer: &mut RunWriter) -> Result<(), moe_trace::Error> {
        writer.manifest_mut().hot_cache = Some(self.manifest);
        writer.write_perf(&self.report)
    }
}

/// What a cache that was built lacks.
fn warnings(report: &HotCacheReport) -> Vec<String> {
    let profile = report.without_profile.as_ref().map(|arch| {
        format!(
            "warning: the hot cache has no settings for architecture {arch}; it runs without the shortcuts for single tokens"
        )
    });
    let dropped = report.dropped.first().map(|first| {
        format!(
            "warning: {} of the hot cache could not be copied, so the CPU computes their experts; first error, lane {} and layer {}: {}",
            counted(report.dropped.len(), "layer"),
            first.lane,
            first.layer,
            first.reason
        )
    });
    profile.into_iter().chain(dropped).collect()
}

fn failures(cache: &HotCache) -> HotFailures {
    let events = cache.events();
    HotFailures {
        layers: events.dropped_layers,
        calls: events.failed_calls,
        exchanges: events.failed_exchanges,
        first_error: events.first_failure.clone(),
    }
}

#[cfg(test)]
mod tests {
    use moe_executor::hot_cache::DroppedLayer;
    use moe_trace::LayerId;

    use super::*;

    #[test]
    fn warns_of_a_missing_profile_and_of_dropped_layers() {
        let mut report = HotCacheReport::default();
        assert_eq!(warnings(&report), Vec::<String>::new());
        report.without_profile = Some("glm4moe".to_owned());
        report.dropped = vec![DroppedLayer {
            lane: 1,
            layer: LayerId(3),
            n_experts: 8,
            reason: "out of memory".to_owned(),
        }];
        let [profile, dropped] = &warnings(&report)[..] else {
            panic!("two warnings");
        };
        assert!(
            profile.starts_with("warning: the hot cache has no settings for architecture glm4moe;")
        );
        assert!(dropped.starts_with("warning: 1 layer of the hot cache could not be copied"));
        assert!(dropped.ends_with("lane 1 and layer 3: out of memory"));
    }
}
