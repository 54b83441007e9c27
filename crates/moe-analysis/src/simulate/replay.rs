//! Replay of a trace with one policy.

use moe_placement::cache::{Access, Changes, Experts, Key, Policy};

use super::Batches;

/// Result of a replay. Arrays are by phase: `[prompt, generate, unknown]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcome {
    /// Look-ups: one per distinct expert of each batch.
    pub look_ups: [u64; 3],
    /// Look-ups of resident experts.
    pub hits: [u64; 3],
    /// Bytes of missing experts.
    pub read_bytes: [u64; 3],
    /// Bytes loaded without a look-up, by a plan or an exchange.
    pub loaded_bytes: u64,
    /// Number of evicted experts.
    pub evictions: u64,
}

impl Outcome {
    /// Hit rate of all look-ups in percent; 0 without look-ups.
    pub fn hit_pct_cum(&self) -> f64 {
        percent(self.hits.iter().sum(), self.look_ups.iter().sum())
    }

    /// Hit rate of look-ups of generated tokens in percent; `None` without look-ups.
    pub fn hit_pct_decode(&self) -> Option<f64> {
        (self.look_ups[1] > 0).then(|| percent(self.hits[1], self.look_ups[1]))
    }

    /// Bytes of missing experts in all phases.
    pub fn total_read_bytes(&self) -> u64 {
        self.read_bytes.iter().copied().fold(0, u64::saturating_add)
    }

    /// Bytes transferred: for misses, and without a look-up.
    pub fn moved_bytes(&self) -> u64 {
        self.total_read_bytes().saturating_add(self.loaded_bytes)
    }
}

fn percent(hits: u64, look_ups: u64) -> f64 {
    100.0 * hits as f64 / look_ups.max(1) as f64
}

/// Replays a trace with a policy.
pub fn replay(batches: &Batches, policy: &mut dyn Policy) -> Outcome {
    let experts = batches.experts();
    let mut outcome = Outcome::default();
    let mut changes = Changes::default();
    policy.start(&mut changes);
    outcome.add_changes(experts, &mut changes);
    for batch in batches.iter() {
        let phase = batch.phase();
        for (key, again) in batch.selections() {
            if again {
                policy.look_up_again(key);
                continue;
            }
            outcome.look_ups[phase] += 1;
            match policy.look_up(key) {
                Access::Hit => outcome.hits[phase] += 1,
                Access::Loaded | Access::Bypassed => {
                    let bytes = experts.bytes(key);
                    let read = &mut outcome.read_bytes[phase];
                    *read = read.saturating_add(bytes);
                }
            }
        }
        policy.end_batch(&mut changes);
        if batch.ends_request() {
            policy.end_request(&mut changes);
        }
        outcome.add_changes(experts, &mut changes);
    }
    outcome
}

impl Outcome {
    fn add_changes(&mut self, experts: &Experts, changes: &mut Changes) {
        self.evictions += changes.evicted.len() as u64;
        let loaded = changes.loaded.iter().map(|&key: &Key| experts.bytes(key));
        self.loaded_bytes = loaded.fold(self.loaded_bytes, u64::saturating_add);
        changes.clear();
    }
}
