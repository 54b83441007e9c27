//! Policies with index structures compared with reference implementations that scan all resident experts.

use std::cmp::Ordering;
use std::sync::Arc;

use moe_placement::cache::{Changes, Experts, Future, Key, PolicyInputs, PolicyName};
use moe_placement::{ExpertId, LayerId};
use proptest::prelude::*;

const N_LAYER: u16 = 3;
const N_EXPERT: u32 = 7;

/// State of an expert at an eviction.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    bytes: u64,
    /// All look-ups.
    total: u64,
    /// Look-ups since the expert was loaded.
    count: u64,
    /// Clock at the last use. Further tokens of a batch advance the clock too.
    last: u64,
    /// Number of the next look-up; `None` if the expert is not looked up again.
    next: Option<usize>,
}

/// Eviction order of two experts: `Less` if `a` is evicted before `b`. `look_ups` is the number of look-ups so far.
type EvictionOrder = fn(a: &Known, b: &Known, look_ups: usize, clock: u64) -> Ordering;

fn lfu(a: &Known, b: &Known, _: usize, _: u64) -> Ordering {
    a.total.cmp(&b.total).then(a.last.cmp(&b.last))
}

fn lfru(a: &Known, b: &Known, _: usize, clock: u64) -> Ordering {
    let score = |known: &Known| known.count as f64 / (clock - known.last + 1) as f64;
    score(a).total_cmp(&score(b)).then(a.last.cmp(&b.last))
}

/// Ties go to the lower key, because keys are compared in ascending order.
fn belady_size(a: &Known, b: &Known, look_ups: usize, _: u64) -> Ordering {
    let rank = |known: &Known| match known.next {
        None => u64::MAX,
        Some(next) => (next - look_ups) as u64 * known.bytes,
    };
    rank(b).cmp(&rank(a))
}

/// Evictions of each batch by a scan of all resident experts.
fn by_scan(
    batches: &[Vec<Key>],
    experts: &Experts,
    budget: u64,
    eviction_order: EvictionOrder,
) -> Vec<Vec<Key>> {
    let mut known: Vec<Known> = (0..experts.len() as Key)
        .map(|key| Known {
            bytes: experts.bytes(key),
            ..Known::default()
        })
        .collect();
    let order: Vec<Key> = batches.iter().flat_map(|batch| distinct(batch)).collect();
    let (mut held, mut look_ups, mut clock) = (Vec::<Key>::new(), 0, 0);
    let mut all = Vec::new();
    for batch in batches {
        for (at, key) in batch.iter().enumerate() {
            clock += 1;
            let it = &mut known[*key as usize];
            it.last = clock;
            if batch[..at].contains(key) {
                continue;
            }
            it.total += 1;
            it.count += 1;
            if !held.contains(key) {
                held.push(*key);
                it.count = 1;
            }
            let rest = order[look_ups + 1..].iter();
            it.next = rest
                .enumerate()
                .find(|(_, other)| *other == key)
                .map(|(distance, _)| look_ups + 1 + distance);
            look_ups += 1;
        }
        let mut evicted = Vec::new();
        while held.iter().map(|&key| experts.bytes(key)).sum::<u64>() > budget {
            let mut candidates: Vec<Key> = held.clone();
            candidates.retain(|key| !batch.contains(key));
            candidates.sort();
            let first = candidates.into_iter().reduce(|first, key| {
                let order = eviction_order(
                    &known[key as usize],
                    &known[first as usize],
                    look_ups,
                    clock,
                );
                if order.is_lt() { key } else { first }
            });
            let Some(first) = first else { break };
            held.retain(|&key| key != first);
            evicted.push(first);
        }
        all.push(evicted);
    }
    all
}

/// The distinct experts of a batch.
fn distinct(batch: &[Key]) -> Vec<Key> {
    let firsts = batch.iter().enumerate();
    let firsts = firsts.filter(|(at, key)| !batch[..*at].contains(key));
    firsts.map(|(_, &key)| key).collect()
}

fn by_policy(
    batches: &[Vec<Key>],
    experts: &Arc<Experts>,
    budget: u64,
    name: &str,
) -> Vec<Vec<Key>> {
    let look_ups = batches.iter().flat_map(|batch| distinct(batch));
    let inputs = PolicyInputs {
        future: Future::new(experts.len(), look_ups).map(Arc::new),
        ..PolicyInputs::default()
    };
    let name: PolicyName = name.parse().unwrap();
    let mut policy = inputs.policy(name, experts, budget).unwrap();
    let batches = batches.iter().map(|batch| {
        for (at, key) in batch.iter().enumerate() {
            if batch[..at].contains(key) {
                policy.look_up_again(*key);
            } else {
                policy.look_up(*key);
            }
        }
        let mut changes = Changes::default();
        policy.end_batch(&mut changes);
        changes.evicted
    });
    batches.collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn evictions_match_full_scan(
        batches in prop::collection::vec(
            (0..N_LAYER, prop::collection::vec(0..N_EXPERT, 1..5)), 1..300),
        budget in 0u64..90,
        n_size in 1u64..5,
    ) {
        let ids = (0..N_LAYER).flat_map(|layer| (0..N_EXPERT).map(move |expert| (layer, expert)));
        let sizes = ids.map(|(layer, expert)| {
            let bytes = 3 + u64::from(u32::from(layer) + expert) % n_size;
            (LayerId(layer), ExpertId(expert), bytes)
        });
        let experts = Arc::new(Experts::new(&sizes.collect()));
        let keys = batches.iter().map(|(layer, selected)| -> Vec<Key> {
            selected.iter().map(|&expert| experts.key(LayerId(*layer), ExpertId(expert)).unwrap()).collect()
        });
        let batches: Vec<Vec<Key>> = keys.collect();
        let policies: [(&str, EvictionOrder); 3] =
            [("lfu", lfu), ("lfru", lfru), ("beladysize", belady_size)];
        for (name, eviction_order) in policies {
            prop_assert_eq!(
                by_policy(&batches, &experts, budget, name),
                by_scan(&batches, &experts, budget, eviction_order),
                "{}", name
            );
        }
    }
}
