//! Prefetching: experts are loaded before they are chosen, because a predictor named them.
//!
//! Time stands still within a layer until its experts are there, then the layer works for its window. When a layer's choice
//! is known, what it misses is loaded, and behind that the experts that are predicted for the layer `depth` layers on, into
//! a buffer of its own: the cache changes only by look-ups. The link carries one expert after the other, in the order in
//! which they were asked for. What is not used when its layer comes is dropped.

use moe_placement::cache::{Access, Changes, Key, Policy};
use moe_placement::predict::Predictor;

use super::Batches;

/// How fast experts come, and how much time there is.
#[derive(Debug, Clone, PartialEq)]
pub struct Prefetch {
    /// Bytes in a second over the link.
    pub link_bytes_per_s: f64,
    /// Time that each expert takes beside its bytes.
    pub link_latency_s: f64,
    /// Time that each layer works once its experts are there (`[n_layer]`).
    pub windows_s: Vec<f64>,
    /// Layers ahead, at least 1 and fewer than the model has.
    pub depth: usize,
    /// Experts to predict; `None`: as many as the layer before chose.
    pub n_predict: Option<usize>,
}

/// What became of look-ups and predictions for generated tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Prefetched {
    /// Passes of a layer.
    pub passes: u64,
    /// Look-ups.
    pub look_ups: u64,
    /// The cache had it.
    pub hits: u64,
    /// Predicted, and there in time.
    pub timely: u64,
    /// Predicted, but still on its way.
    pub late: u64,
    /// Neither.
    pub missed: u64,
    /// Loaded and not used.
    pub wasted: u64,
    /// Predictions, whether or not the cache had the expert.
    pub predicted: u64,
    /// Those that were chosen.
    pub correct: u64,
    /// Bytes over the link.
    pub moved_bytes: u64,
    /// Time that layers waited for experts.
    pub stall_s: f64,
    /// Time that layers worked.
    pub work_s: f64,
}

/// The state of a replay.
struct Replay<'a> {
    batches: &'a Batches,
    prefetch: &'a Prefetch,
    now: f64,
    /// The link is busy until then.
    link_free: f64,
    /// `[n_layer]`: predictions for the layer's next pass.
    predicted: Vec<Vec<Key>>,
    /// `[n_layer]`: what was asked for, and when it is there.
    coming: Vec<Vec<(Key, f64)>>,
    result: Prefetched,
}

/// Replays a trace with a cache and a predictor. Prompts fill the cache, without time.
pub fn prefetch(
    batches: &Batches,
    policy: &mut dyn Policy,
    predictor: &mut dyn Predictor,
    prefetch: &Prefetch,
) -> Prefetched {
    let n_layer = batches.experts().n_layer();
    let mut replay = Replay {
        batches,
        prefetch,
        now: 0.0,
        link_free: 0.0,
        predicted: vec![Vec::new(); n_layer],
        coming: vec![Vec::new(); n_layer],
        result: Prefetched::default(),
    };
    let mut changes = Changes::default();
    policy.start(&mut changes);
    for batch in batches.iter() {
        let chosen: Vec<Key> = batch.look_ups().collect();
        let Some(&first) = chosen.first() else {
            continue;
        };
        let layer = batches.experts().layer_index(first);
        let is_generated = batch.phase() == 1;
        let mut ready = replay.now;
        for (key, again) in batch.choices() {
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
            replay.end_pass(layer, &chosen);
            predictor.observe(layer, &chosen);
            replay.ask(layer, &chosen, policy, predictor);
            replay.result.stall_s += ready - replay.now;
            replay.result.work_s += prefetch.windows_s[layer];
            replay.now = ready + prefetch.windows_s[layer];
        } else {
            let all: Vec<Key> = batch.choices().map(|(key, _)| key).collect();
            predictor.prompt(layer, &all);
        }
    }
    replay.result.wasted += replay
        .coming
        .iter()
        .map(|keys| keys.len() as u64)
        .sum::<u64>();
    replay.result
}

impl Replay<'_> {
    /// Tells when an expert of the running pass is there.
    fn look_up(&mut self, layer: usize, key: Key, access: Access) -> f64 {
        self.result.look_ups += 1;
        if access == Access::Hit {
            self.result.hits += 1;
            return self.now;
        }
        let coming = &mut self.coming[layer];
        let Some(place) = coming.iter().position(|&(other, _)| other == key) else {
            self.result.missed += 1;
            return self.load(key);
        };
        let (_, there) = coming.swap_remove(place);
        if there <= self.now {
            self.result.timely += 1;
        } else {
            self.result.late += 1;
        }
        there
    }

    /// Drops what was not used, and counts what was predicted.
    fn end_pass(&mut self, layer: usize, chosen: &[Key]) {
        self.result.passes += 1;
        self.result.wasted += self.coming[layer].len() as u64;
        self.coming[layer].clear();
        let predicted = std::mem::take(&mut self.predicted[layer]);
        let correct = predicted.iter().filter(|key| chosen.contains(key));
        self.result.predicted += predicted.len() as u64;
        self.result.correct += correct.count() as u64;
    }

    /// Asks for what is predicted from a layer's choice.
    fn ask(
        &mut self,
        layer: usize,
        chosen: &[Key],
        policy: &dyn Policy,
        predictor: &dyn Predictor,
    ) {
        let target = (layer + self.prefetch.depth) % self.coming.len();
        let n = self.prefetch.n_predict.unwrap_or(chosen.len());
        let mut predicted = Vec::new();
        predictor.predict(target, n, &mut predicted);
        for &key in &predicted {
            let is_asked = self.coming[target].iter().any(|&(other, _)| other == key);
            if !policy.holds(key) && !is_asked {
                let there = self.load(key);
                self.coming[target].push((key, there));
            }
        }
        self.predicted[target] = predicted;
    }

    /// Asks for an expert; tells when it is there.
    fn load(&mut self, key: Key) -> f64 {
        let bytes = self.batches.experts().bytes(key);
        self.result.moved_bytes = self.result.moved_bytes.saturating_add(bytes);
        let takes = self.prefetch.link_latency_s + bytes as f64 / self.prefetch.link_bytes_per_s;
        self.link_free = self.link_free.max(self.now) + takes;
        self.link_free
    }
}
