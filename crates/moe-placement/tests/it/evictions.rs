//! Policies whose order of eviction is kept in structures, against a look at everything that is held.

use std::cmp::Ordering;
use std::sync::Arc;

use moe_placement::cache::{Changes, Experts, Future, Key, PolicyName, Setting};
use moe_placement::{ExpertId, LayerId};
use proptest::prelude::*;

const N_LAYER: u16 = 3;
const N_EXPERT: u32 = 7;

/// What is known of an expert when one must go.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    bytes: u64,
    /// Look-ups in all, and since it came.
    total: u64,
    count: u64,
    /// The clock, which further tokens of a batch move too, at the last use.
    last: u64,
    /// Number of the next look-up; `None` = never.
    next: Option<usize>,
}

/// Whether `a` goes before `b`, which is not the same, when so many look-ups are done and the clock is there.
type GoesFirst = fn(a: &Known, b: &Known, look_ups: usize, clock: u64) -> Ordering;

fn lfu(a: &Known, b: &Known, _: usize, _: u64) -> Ordering {
    a.total.cmp(&b.total).then(a.last.cmp(&b.last))
}

fn lfru(a: &Known, b: &Known, _: usize, clock: u64) -> Ordering {
    let score = |known: &Known| known.count as f64 / (clock - known.last + 1) as f64;
    score(a).total_cmp(&score(b)).then(a.last.cmp(&b.last))
}

/// Of equals the one with the lower key goes first, by the order in which they are compared.
fn belady_size(a: &Known, b: &Known, look_ups: usize, _: u64) -> Ordering {
    let rank = |known: &Known| match known.next {
        None => u64::MAX,
        Some(next) => (next - look_ups) as u64 * known.bytes,
    };
    rank(b).cmp(&rank(a))
}

/// The evictions of each batch.
fn by_looking(
    batches: &[Vec<Key>],
    experts: &Experts,
    budget: u64,
    goes_first: GoesFirst,
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
            let mut may_go: Vec<Key> = held.clone();
            may_go.retain(|key| !batch.contains(key));
            may_go.sort();
            let first = may_go.into_iter().reduce(|first, key| {
                let order = goes_first(
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

/// The experts of a batch, each once.
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
    let setting = Setting {
        future: Future::new(experts.len(), look_ups).map(Arc::new),
        ..Setting::default()
    };
    let name: PolicyName = name.parse().unwrap();
    let mut policy = setting.policy(name, experts, budget).unwrap();
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
    fn structures_evict_what_a_look_at_all_would(
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
        let keys = batches.iter().map(|(layer, chosen)| -> Vec<Key> {
            chosen.iter().map(|&expert| experts.key(LayerId(*layer), ExpertId(expert)).unwrap()).collect()
        });
        let batches: Vec<Vec<Key>> = keys.collect();
        let policies: [(&str, GoesFirst); 3] =
            [("lfu", lfu), ("lfru", lfru), ("beladysize", belady_size)];
        for (name, goes_first) in policies {
            prop_assert_eq!(
                by_policy(&batches, &experts, budget, name),
                by_looking(&batches, &experts, budget, goes_first),
                "{}", name
            );
        }
    }
}
