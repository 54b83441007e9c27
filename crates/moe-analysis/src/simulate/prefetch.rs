//! Prefetching: a predictor names experts, which are loaded before they are selected.
//!
//! Model of time: a layer waits until its experts are loaded, then computes for its time window. When a layer has routed,
//! its missing experts are queued for loading, followed by the experts predicted for the layer `depth` layers later.
//! Predicted experts go to a separate buffer; only look-ups change the cache. The interconnect transfers one expert at a
//! time, in the order of the requests. Prefetched experts that their layer does not use are dropped.

use moe_placement::cache::{Access, Changes, Key, Policy};
use moe_placement::predict::{Predictor, Prefetches};

use super::Batches;

/// Parameters of prefetching.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefetchOptions {
    /// Bandwidth of the interconnect, in bytes/s.
    pub link_bytes_per_s: f64,
    /// Latency per expert in addition to its bytes, in s.
    pub link_latency_s: f64,
    /// `[n_layer]`: time that each layer computes after its experts are loaded, in s.
    pub windows_s: Vec<f64>,
    /// Number of layers to predict ahead: at least 1, less than the number of layers.
    pub depth: usize,
    /// Number of experts to predict; `None`: the number that the predicting layer has selected.
    pub n_predict: Option<usize>,
}

/// Result of [`prefetch()`]: look-ups and predictions of generated tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PrefetchOutcome {
    /// Number of simulated passes of a layer.
    pub passes: u64,
    /// Number of look-ups.
    pub look_ups: u64,
    /// Look-ups served from the cache.
    pub hits: u64,
    /// Misses whose prefetch was complete when the layer needed the expert.
    pub timely: u64,
    /// Misses whose prefetch was still in flight.
    pub late: u64,
    /// Misses that were not prefetched.
    pub missed: u64,
    /// Prefetched experts that were not used.
    pub wasted: u64,
    /// Predicted experts, whether or not they were in the cache.
    pub predicted: u64,
    /// Predicted experts that were selected.
    pub correct: u64,
    /// Bytes transferred.
    pub moved_bytes: u64,
    /// Time that layers waited for experts, in s.
    pub stall_s: f64,
    /// Time that layers computed, in s.
    pub compute_s: f64,
}

/// State of a replay.
struct Replay<'a> {
    batches: &'a Batches,
    now: f64,
    link: Link<'a>,
    /// Prefetched experts, and the time at which each is loaded.
    prefetches: Prefetches<f64>,
    result: PrefetchOutcome,
}

/// Replays a trace with a cache and a predictor. Prompts fill the cache and take no time.
pub fn prefetch(
    batches: &Batches,
    policy: &mut dyn Policy,
    predictor: &mut dyn Predictor,
    options: &PrefetchOptions,
) -> PrefetchOutcome {
    let n_layer = batches.experts().n_layer();
    let mut replay = Replay {
        batches,
        now: 0.0,
        link: Link {
            options,
            idle_at: 0.0,
            moved_bytes: 0,
        },
        prefetches: Prefetches::new(n_layer, options.depth, options.n_predict),
        result: PrefetchOutcome::default(),
    };
    let mut changes = Changes::default();
    policy.start(&mut changes);
    for batch in batches.iter() {
        let selected: Vec<Key> = batch.look_ups().collect();
        let Some(&first) = selected.first() else {
            continue;
        };
        let layer = batches.experts().layer_index(first);
        let is_generated = batch.phase() == 1;
        let mut ready = replay.now;
        for (key, again) in batch.selections() {
            if again {
                policy.look_up_again(key);
                continue;
            }
            let access = policy.look_up(key);
            if is_generated {
                ready = ready.max(replay.look_up(layer, key, access));
            }
        }
        policy.end_batch(&mut changes);
        if batch.ends_request() {
            policy.end_request(&mut changes);
        }
        changes.clear();
        if is_generated {
            drop(replay.prefetches.end_pass(layer, &selected));
            predictor.observe(layer, &selected);
            replay.request_predicted(layer, selected.len(), policy, predictor);
            replay.result.stall_s += ready - replay.now;
            replay.result.compute_s += options.windows_s[layer];
            replay.now = ready + options.windows_s[layer];
        } else {
            let all: Vec<Key> = batch.selections().map(|(key, _)| key).collect();
            predictor.observe_prompt(layer, &all);
        }
    }
    let counts = replay.prefetches.counts();
    PrefetchOutcome {
        passes: counts.passes,
        predicted: counts.predicted,
        correct: counts.correct,
        wasted: counts.wasted,
        moved_bytes: replay.link.moved_bytes,
        ..replay.result
    }
}

impl Replay<'_> {
    /// Looks up an expert of the current pass; returns the time at which it is loaded.
    fn look_up(&mut self, layer: usize, key: Key, access: Access) -> f64 {
        self.result.look_ups += 1;
        if access == Access::Hit {
            self.result.hits += 1;
            return self.now;
        }
        let Some(loaded) = self.prefetches.take(layer, key) else {
            self.result.missed += 1;
            return self.link.load(self.batches.experts().bytes(key), self.now);
        };
        if loaded <= self.now {
            self.result.timely += 1;
        } else {
            self.result.late += 1;
        }
        loaded
    }

    /// Requests the experts that are predicted after a layer has routed.
    fn request_predicted(
        &mut self,
        layer: usize,
        n_selected: usize,
        policy: &dyn Policy,
        predictor: &dyn Predictor,
    ) {
        let (experts, now, link) = (self.batches.experts(), self.now, &mut self.link);
        let load = |key| link.load(experts.bytes(key), now);
        let holds = |key| policy.holds(key);
        self.prefetches
            .request(layer, n_selected, predictor, holds, load);
    }
}

/// The interconnect.
struct Link<'a> {
    options: &'a PrefetchOptions,
    /// Time at which it becomes idle.
    idle_at: f64,
    moved_bytes: u64,
}

impl Link<'_> {
    /// Queues `bytes` bytes for loading at the time `now`; returns the time at which they are loaded.
    fn load(&mut self, bytes: u64, now: f64) -> f64 {
        self.moved_bytes = self.moved_bytes.saturating_add(bytes);
        let options = self.options;
        let duration = options.link_latency_s + bytes as f64 / options.link_bytes_per_s;
        self.idle_at = self.idle_at.max(now) + duration;
        self.idle_at
    }
}
