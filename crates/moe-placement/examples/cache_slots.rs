//! Drives real cache slots with a policy: `cache_slots [POLICY]`, for example `cache_slots lfu`. The default is `lru`.
//!
//! The "model" is a buffer with the weights of all experts. The "device" is a buffer with fixed-size slots. The policy
//! decides which expert to copy to a slot and which slot to free. Routing decisions are random, but prefer experts with low
//! ids.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;

use moe_placement::cache::{Access, Changes, Experts, Key, PolicyInputs};
use moe_placement::plan::ExpertSizes;
use moe_placement::random::SplitMix64;
use moe_placement::{ExpertId, LayerId};

const N_LAYER: u16 = 4;
const N_EXPERT: u32 = 16;
const N_EXPERT_USED: usize = 2;
/// Size of an expert, and of a slot, in bytes.
const EXPERT_BYTES: usize = 1024;
/// Number of experts that the cache holds between batches.
const N_CACHED: usize = 24;
const N_TOKENS: usize = 1000;

/// Slots in device memory.
struct Slots {
    memory: Vec<u8>,
    slot_of: HashMap<Key, usize>,
    free: Vec<usize>,
}

impl Slots {
    /// Evictions happen at the end of a batch, so the device needs slots for a batch in addition to the cached experts.
    fn new() -> Slots {
        let n_slots = N_CACHED + N_EXPERT_USED;
        Slots {
            memory: vec![0; n_slots * EXPERT_BYTES],
            slot_of: HashMap::new(),
            free: (0..n_slots).collect(),
        }
    }

    fn weights(&self, key: Key) -> Option<&[u8]> {
        let start = self.slot_of.get(&key)? * EXPERT_BYTES;
        Some(&self.memory[start..start + EXPERT_BYTES])
    }

    /// Copies an expert to a free slot.
    fn load(&mut self, key: Key, weights: &[u8]) -> Result<(), Box<dyn Error>> {
        let slot = self.free.pop().ok_or("no free slot")?;
        let start = slot * EXPERT_BYTES;
        self.memory[start..start + EXPERT_BYTES].copy_from_slice(weights);
        self.slot_of.insert(key, slot);
        Ok(())
    }

    fn evict(&mut self, key: Key) {
        self.free.extend(self.slot_of.remove(&key));
    }

    /// Applies the changes of a policy: evictions before loads.
    fn apply(&mut self, changes: &mut Changes, model: &[u8]) -> Result<(), Box<dyn Error>> {
        for key in changes.evicted.drain(..) {
            self.evict(key);
        }
        for key in changes.loaded.drain(..) {
            self.load(key, weights_of(model, key))?;
        }
        Ok(())
    }
}

/// The weights of an expert in the model. Keys number the experts of all layers.
fn weights_of(model: &[u8], key: Key) -> &[u8] {
    let start = key as usize * EXPERT_BYTES;
    &model[start..start + EXPERT_BYTES]
}

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).unwrap_or("lru".into()).parse()?;

    let ids = (0..N_LAYER).flat_map(|layer| (0..N_EXPERT).map(move |expert| (layer, expert)));
    let sizes: ExpertSizes = ids
        .map(|(layer, expert)| (LayerId(layer), ExpertId(expert), EXPERT_BYTES as u64))
        .collect();
    let experts = Arc::new(Experts::new(&sizes));
    let model: Vec<u8> = (0..experts.len())
        .flat_map(|key| [key as u8; EXPERT_BYTES])
        .collect();

    let budget = (N_CACHED * EXPERT_BYTES) as u64;
    let mut policy = PolicyInputs::default().policy(name, &experts, budget)?;
    let mut slots = Slots::new();
    let mut changes = Changes::default();
    policy.start(&mut changes);
    slots.apply(&mut changes, &model)?;

    let (mut hits, mut misses, mut evictions) = (0u64, 0u64, 0u64);
    let mut random = SplitMix64::new(0);
    for _ in 0..N_TOKENS {
        for layer in 0..N_LAYER {
            // A batch: the experts of one generated token in one layer.
            for expert in route(&mut random) {
                let key = experts
                    .key(LayerId(layer), expert)
                    .ok_or("no such expert")?;
                match policy.look_up(key) {
                    Access::Hit => hits += 1,
                    Access::Loaded => {
                        misses += 1;
                        slots.load(key, weights_of(&model, key))?;
                    }
                    // The expert stays in CPU memory and is computed there.
                    Access::Bypassed => misses += 1,
                }
                // The matrix product of the expert would use these weights.
                let weights = slots.weights(key).unwrap_or(weights_of(&model, key));
                assert_eq!(weights[0], key as u8);
            }
            policy.end_batch(&mut changes);
            evictions += changes.evicted.len() as u64;
            slots.apply(&mut changes, &model)?;
        }
    }
    policy.end_request(&mut changes);
    slots.apply(&mut changes, &model)?;

    let hit_rate = 100.0 * hits as f64 / (hits + misses) as f64;
    println!(
        "{name}: {hits} hits, {misses} misses, {evictions} evictions, hit rate {hit_rate:.1} %"
    );
    Ok(())
}

/// Selects distinct experts. The minimum of two random ids prefers low ids.
fn route(random: &mut SplitMix64) -> Vec<ExpertId> {
    let mut selected = Vec::new();
    while selected.len() < N_EXPERT_USED {
        let id = random
            .below(N_EXPERT as usize)
            .min(random.below(N_EXPERT as usize));
        let expert = ExpertId(id as u32);
        if !selected.contains(&expert) {
            selected.push(expert);
        }
    }
    selected
}
