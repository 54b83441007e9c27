use moe_ids::{ExpertId, LayerId};

use super::*;
use crate::cache::Access;
use crate::random::SplitMix64;

const N_EXPERT: u32 = 8;

/// Sizes of the experts of `n_layer` layers: 10 bytes in even layers, `odd` bytes in odd ones.
fn sizes(n_layer: u16, odd: u64) -> ExpertSizes {
    let layers = (0..n_layer).flat_map(|layer| (0..N_EXPERT).map(move |expert| (layer, expert)));
    let bytes = |layer: u16| if layer.is_multiple_of(2) { 10 } else { odd };
    layers
        .map(|(layer, expert)| (LayerId(layer), ExpertId(expert), bytes(layer)))
        .collect()
}

/// `n` distinct experts.
fn select(random: &mut SplitMix64, n: usize) -> Vec<i32> {
    let mut ids = Vec::new();
    while ids.len() < n {
        let id = random
            .below(N_EXPERT as usize)
            .min(random.below(N_EXPERT as usize)) as i32;
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids
}

/// The caller's slots: the expert that each slot of each class contains.
#[derive(Default)]
struct Memory(std::collections::BTreeMap<(usize, Slot), (LayerId, ExpertId)>);

impl Memory {
    fn put(&mut self, class: usize, slot: Slot, expert: (LayerId, ExpertId)) {
        let before = self.0.insert((class, slot), expert);
        assert_eq!(before, None, "the slot of {expert:?} is not free");
    }

    fn apply(&mut self, class: impl Fn(LayerId) -> usize, layer: LayerId, actions: &Actions) {
        for &freed in &actions.freed {
            let n = self.0.len();
            self.0.retain(|_, expert| *expert != freed);
            assert_eq!(self.0.len(), n - 1, "{freed:?} was in a slot");
        }
        for used in &actions.used {
            match used.source {
                Source::Load(slot) => self.put(class(layer), slot, (layer, used.expert)),
                Source::Slot(slot) => assert_eq!(
                    self.0.get(&(class(layer), slot)),
                    Some(&(layer, used.expert))
                ),
                Source::Uncached => {}
            }
        }
        for &(layer, expert, slot) in &actions.prefetched {
            self.put(class(layer), slot, (layer, expert));
        }
    }
}

/// Hits and evictions equal those of the policy, no slot is used twice, and with one size and single tokens every expert has a
/// slot.
#[test]
fn slots_contain_what_the_policy_holds() {
    let policies = OnlinePolicy::ALL.map(PolicyName::Shared);
    let layered = OnlinePolicy::ALL.map(PolicyName::Layered);
    let predictors = PredictorName::ALL.map(Some);
    let mut random = SplitMix64::new(5);
    for (at, policy) in policies.into_iter().chain(layered).enumerate() {
        for (odd, budget) in [(10, 80), (10, 150), (10, 0), (17, 200), (10, 1000)] {
            let predictor = predictors.into_iter().chain([None]).nth(at % 5).flatten();
            let settings = Settings {
                predictor,
                depth: 1 + at % 3,
                ..Settings::new(policy, budget)
            };
            let what = format!("{settings:?}, {odd} bytes");
            let sizes = sizes(4, odd);
            let class = |layer: LayerId| usize::from(odd != 10 && layer.0 % 2 == 1);
            let mut cache = DynamicCache::new(&sizes, class, 2, &settings).unwrap();
            let experts = Arc::new(Experts::new(&sizes));
            let mut simulated = PolicyInputs::default()
                .policy(policy, &experts, budget)
                .unwrap();
            let (mut hits, mut evictions) = (0, 0);
            let mut memory = Memory::default();
            for pass in 0..200 {
                let n_tokens = if pass % 40 == 0 { 3 } else { 1 };
                for layer in (0..4).map(LayerId) {
                    let tokens = (0..n_tokens).flat_map(|_| select(&mut random, 2));
                    let ids: Vec<i32> = tokens.collect();
                    let mut changes = Changes::default();
                    let mut seen = Vec::new();
                    for &id in &ids {
                        let key = experts.key(layer, ExpertId(id as u32)).unwrap();
                        if seen.contains(&key) {
                            simulated.look_up_again(key);
                        } else {
                            seen.push(key);
                            hits += u64::from(simulated.look_up(key) == Access::Hit);
                        }
                    }
                    simulated.end_batch(&mut changes);
                    evictions += changes.evicted.len() as u64;
                    let actions = cache.call(layer, n_tokens == 1, &ids, |_| true);
                    memory.apply(class, layer, actions);
                }
            }
            let counts = cache.counts();
            let slots: usize = cache.n_slots().iter().flatten().sum();
            if slots == 0 {
                (hits, evictions) = (0, 0);
            }
            assert_eq!(counts.hits.iter().sum::<u64>(), hits, "{what}");
            assert_eq!(counts.evictions, evictions, "{what}");
            let missed = counts.prefetch.timely + counts.prefetch.late + counts.prefetch.missed;
            assert_eq!(missed, counts.look_ups[1] - counts.hits[1], "{what}");
            assert!(memory.0.len() <= slots, "{what}");
            let fits = odd == 10 && budget >= 320;
            assert!(!fits || counts.without_slot == 0, "{what}: {counts:?}");
        }
    }
}

/// With one size of experts and single tokens, the slots of the budget suffice.
#[test]
fn every_expert_of_single_tokens_has_a_slot() {
    let mut random = SplitMix64::new(6);
    for policy in OnlinePolicy::ALL.map(PolicyName::Shared) {
        let settings = Settings {
            predictor: Some(PredictorName::Markov),
            ..Settings::new(policy, 57)
        };
        let mut cache = DynamicCache::new(&sizes(4, 10), |_| 0, 2, &settings).unwrap();
        assert_eq!(cache.n_slots(), [[5, 2]]);
        for _ in 0..200 {
            for layer in (0..4).map(LayerId) {
                let ids = select(&mut random, 2);
                cache.call(layer, true, &ids, |_| false);
                for &id in &ids {
                    assert!(cache.slot(layer, ExpertId(id as u32)).is_some(), "{policy}");
                }
            }
        }
        let counts = cache.counts();
        assert_eq!(
            (counts.without_slot, counts.prefetch.timely),
            (0, 0),
            "{policy}"
        );
        assert!(counts.prefetch.late > 0, "{policy}");
    }
}

#[test]
fn failed_copies_are_copied_again() {
    let lru = PolicyName::Shared(OnlinePolicy::Lru);
    let mut cache = DynamicCache::new(&sizes(1, 10), |_| 0, 2, &Settings::new(lru, 80)).unwrap();
    let layer = LayerId(0);
    let sources = |actions: &Actions| -> Vec<Source> {
        actions.used.iter().map(|used| used.source).collect()
    };
    let first = sources(cache.call(layer, true, &[3, 4], |_| true));
    assert_eq!(first, [Source::Load(0), Source::Load(1)]);
    cache.copy_failed(layer, ExpertId(3));
    assert_eq!(cache.slot(layer, ExpertId(3)), None);
    let second = sources(cache.call(layer, true, &[3, 4], |_| true));
    assert_eq!(second, [Source::Load(0), Source::Slot(1)]);
    let counts = cache.counts();
    assert_eq!((counts.hits[1], counts.failed_copies), (2, 1));
}

#[test]
fn rejects_settings_that_a_running_cache_cannot_have() {
    let new = |settings: &Settings| DynamicCache::new(&sizes(3, 10), |_| 0, 2, settings).err();
    for name in ["belady", "beladysize", "staticoracle"] {
        let error = new(&Settings::new(name.parse().unwrap(), 0));
        assert!(matches!(error, Some(Error::NeedsFuture { .. })), "{name}");
    }
    for name in ["static", "staticlearn", "hotcache"] {
        let error = new(&Settings::new(name.parse().unwrap(), 0));
        assert!(matches!(error, Some(Error::FixedContents { .. })), "{name}");
    }
    for (depth, is_valid) in [(0, false), (1, true), (2, true), (3, false)] {
        let settings = Settings {
            predictor: Some(PredictorName::Previous),
            depth,
            ..Settings::new(PolicyName::Shared(OnlinePolicy::Lru), 0)
        };
        assert_eq!(new(&settings).is_none(), is_valid, "{depth}");
    }
}

#[test]
fn a_repeated_call_counts_only_evictions() {
    let lru = PolicyName::Shared(OnlinePolicy::Lru);
    let settings = Settings::new(lru, 20);
    let mut cache = DynamicCache::new(&sizes(1, 10), |_| 0, 1, &settings).unwrap();
    let layer = LayerId(0);
    cache.call(layer, true, &[0, 1], |_| true);
    let before = cache.counts();
    let used = cache.repeat_call(layer, true, &[0, 1]).used.clone();
    assert!(
        used.iter()
            .all(|used| matches!(used.source, Source::Slot(_)))
    );
    assert_eq!(cache.counts(), before);
    let actions = cache.repeat_call(layer, true, &[0, 2]);
    assert_eq!(actions.freed, [(layer, ExpertId(1))]);
    let evictions = before.evictions + 1;
    assert_eq!(
        cache.counts(),
        Counts {
            evictions,
            ..before
        }
    );
}

#[test]
fn a_predictor_needs_two_layers() {
    let mut settings = Settings::new(PolicyName::Shared(OnlinePolicy::Lru), 100);
    assert!(settings.check_depth(1).is_ok());
    settings.predictor = Some(PredictorName::Previous);
    assert!(matches!(
        settings.check_depth(1),
        Err(Error::OneLayer { n_layer: 1 })
    ));
    assert!(settings.check_depth(2).is_ok());
    settings.depth = 2;
    assert!(matches!(
        settings.check_depth(2),
        Err(Error::Depth {
            depth: 2,
            max: 1,
            ..
        })
    ));
}
