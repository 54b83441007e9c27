//! Prefetching: a predictor names experts, which are loaded before they are selected.
//!
//! Model of time: a layer waits until its experts are loaded, then computes for its time window. When a layer has routed,
//! its missing experts are queued for loading, followed by the experts predicted for the layer `depth` layers later.
//! Predicted experts go to a separate buffer; only look-ups change the cache. The interconnect transfers one expert at a
//! time, in the order of the requests. Prefetched experts that their layer does not use are dropped.

use moe_placement::cache::{Access, Changes, Key, Policy};
use moe_placement::predict::Predictor;

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
    options: &'a PrefetchOptions,
    now: f64,
    /// Time at which the interconnect becomes idle.
    link_free: f64,
    /// `[n_layer]`: predictions for the next pass of the layer.
    predicted: Vec<Vec<Key>>,
    /// `[n_layer]`: prefetched experts and the time at which each is loaded.
    in_flight: Vec<Vec<(Key, f64)>>,
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
        options,
        now: 0.0,
        link_free: 0.0,
        predicted: vec![Vec::new(); n_layer],
        in_flight: vec![Vec::new(); n_layer],
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
            replay.end_pass(layer, &selected);
            predictor.observe(layer, &selected);
            replay.request_predicted(layer, &selected, policy, predictor);
            replay.result.stall_s += ready - replay.now;
            replay.result.compute_s += options.windows_s[layer];
            replay.now = ready + options.windows_s[layer];
        } else {
            let all: Vec<Key> = batch.selections().map(|(key, _)| key).collect();
            predictor.observe_prompt(layer, &all);
        }
    }
    replay.result.wasted += replay
        .in_flight
        .iter()
        .map(|keys| keys.len() as u64)
        .sum::<u64>();
    replay.result
}

impl Replay<'_> {
    /// Looks up an expert of the current pass; returns the time at which it is loaded.
    fn look_up(&mut self, layer: usize, key: Key, access: Access) -> f64 {
        self.result.look_ups += 1;
        if access == Access::Hit {
            self.result.hits += 1;
            return self.now;
        }
        let in_flight = &mut self.in_flight[layer];
        let Some(index) = in_flight.iter().position(|&(other, _)| other == key) else {
            self.result.missed += 1;
            return self.load(key);
        };
        let (_, loaded) = in_flight.swap_remove(index);
        if loaded <= self.now {
            self.result.timely += 1;
        } else {
            self.result.late += 1;
        }
        loaded
    }

    /// Drops unused experts and counts correct predictions.
    fn end_pass(&mut self, layer: usize, selected: &[Key]) {
        self.result.passes += 1;
        self.result.wasted += self.in_flight[layer].len() as u64;
        self.in_flight[layer].clear();
        let predicted = std::mem::take(&mut self.predicted[layer]);
        let correct = predicted.iter().filter(|key| selected.contains(key));
        self.result.predicted += predicted.len() as u64;
        self.result.correct += correct.count() as u64;
    }

    /// Requests the experts that are predicted after a layer has routed.
    fn request_predicted(
        &mut self,
        layer: usize,
        selected: &[Key],
        policy: &dyn Policy,
        predictor: &dyn Predictor,
    ) {
        let target = (layer + self.options.depth) % self.in_flight.len();
        let n = self.options.n_predict.unwrap_or(selected.len());
        let mut predicted = Vec::new();
        predictor.predict(target, n, &mut predicted);
        for &key in &predicted {
            let is_in_flight = self.in_flight[target]
                .iter()
                .any(|&(other, _)| other == key);
            if !policy.holds(key) && !is_in_flight {
                let loaded = self.load(key);
                self.in_flight[target].push((key, loaded));
            }
        }
        self.predicted[target] = predicted;
    }

    /// Queues an expert for loading; returns the time at which it is loaded.
    fn load(&mut self, key: Key) -> f64 {
        let bytes = self.batches.experts().bytes(key);
        self.result.moved_bytes = self.result.moved_bytes.saturating_add(bytes);
        let duration = self.options.link_latency_s + bytes as f64 / self.options.link_bytes_per_s;
        self.link_free = self.link_free.max(self.now) + duration;
        self.link_free
    }
}
