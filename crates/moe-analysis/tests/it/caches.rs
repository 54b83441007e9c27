//! Invariants of all caches on synthetic traces.

use std::collections::HashSet;

use moe_analysis::simulate::{
    Batches, Collector, LruCurve, PrefetchOptions, PrefetchOutcome, SimulateOptions, prefetch,
    replay, simulate,
};
use moe_placement::cache::{Access, Changes, Key, OnlinePolicy, PolicyInputs, PolicyName};
use moe_placement::predict::PredictorName;
use moe_trace::{ExpertId, LayerId, Phase, RoutingRow, Sink, TokenId};
use proptest::prelude::*;

use crate::synthetic::{N_EXPERT, N_LAYER, SyntheticBatch, batches_of, traces};

fn batches(made: &[SyntheticBatch], bytes: impl Fn(u16, u32) -> u64) -> Batches {
    batches_of(made, N_LAYER, N_EXPERT, bytes)
}

fn options() -> SimulateOptions {
    SimulateOptions {
        learn: None,
        train_fraction: 0.1,
        update_rate: 0.1,
        seed: 3,
    }
}

/// All policies that need no learn file, including the layered ones.
fn policies() -> Vec<PolicyName> {
    let mut all = PolicyName::all();
    all.retain(|policy| !policy.needs_learn_file());
    all.extend(
        OnlinePolicy::ALL[1..]
            .iter()
            .map(|&online| PolicyName::Layered(online)),
    );
    all.sort();
    all.dedup();
    all
}

fn hits(batches: &Batches, policy: PolicyName, budget: u64) -> u64 {
    let rows = simulate(batches, &[budget], &[policy], &options(), || ()).unwrap();
    rows[0].outcome.hits.iter().sum()
}

/// Drives a policy like real slots: reported loads and evictions must match the resident experts, and the budget must be
/// met.
fn check_slots(batches: &Batches, name: PolicyName, budget: u64) {
    let experts = batches.experts();
    let inputs = PolicyInputs {
        future: batches.future().map(Into::into),
        counts: Some(batches.counts().into()),
        train_look_ups: 10,
        ..PolicyInputs::default()
    };
    let mut policy = inputs.policy(name, experts, budget).unwrap();
    let mut held: HashSet<Key> = HashSet::new();
    let mut changes = Changes::default();
    let apply = |held: &mut HashSet<Key>, changes: &mut Changes| {
        for key in changes.loaded.drain(..) {
            assert!(held.insert(key), "{name}: loads a resident expert");
        }
        for key in changes.evicted.drain(..) {
            assert!(
                held.remove(&key),
                "{name}: evicts an expert that is not resident"
            );
        }
    };
    policy.start(&mut changes);
    apply(&mut held, &mut changes);
    let is_layered = matches!(name, PolicyName::Layered(_));
    let (mut hits, mut misses, mut misses_bytes) = (0, 0, 0);
    for batch in batches.iter() {
        for (key, again) in batch.selections() {
            if again {
                policy.look_up_again(key);
                continue;
            }
            match policy.look_up(key) {
                Access::Hit => {
                    hits += 1;
                    assert!(
                        held.contains(&key),
                        "{name}: hit of an expert that is not resident"
                    );
                }
                Access::Loaded => {
                    misses += 1;
                    misses_bytes += experts.bytes(key);
                    assert!(held.insert(key), "{name}: miss of a resident expert");
                }
                Access::Bypassed => {
                    misses += 1;
                    misses_bytes += experts.bytes(key);
                    assert!(!held.contains(&key), "{name}");
                }
            }
        }
        policy.end_batch(&mut changes);
        for key in batch.look_ups() {
            assert!(
                !changes.evicted.contains(&key),
                "{name}: evicted its own batch"
            );
        }
        apply(&mut held, &mut changes);
        if batch.ends_request() {
            policy.end_request(&mut changes);
            apply(&mut held, &mut changes);
        }
        let used: u64 = held.iter().map(|&key| experts.bytes(key)).sum();
        assert_eq!(used, policy.used_bytes(), "{name}");
        let all = 0..experts.len() as Key;
        assert!(
            all.into_iter()
                .all(|key| held.contains(&key) == policy.holds(key))
        );
        let is_batch_alone = held.iter().all(|key| batch.look_ups().any(|k| k == *key));
        assert!(
            is_layered || used <= budget || is_batch_alone,
            "{name}: too full"
        );
    }
    let outcome = replay(
        batches,
        inputs.policy(name, experts, budget).unwrap().as_mut(),
    );
    assert_eq!(outcome.total_read_bytes(), misses_bytes, "{name}");
    assert_eq!(outcome.look_ups.iter().sum::<u64>(), batches.n_look_ups());
    assert_eq!(outcome.hits.iter().sum::<u64>(), hits, "{name}");
    assert_eq!(hits + misses, batches.n_look_ups(), "{name}");
    let loads_ahead = matches!(name, PolicyName::Static | PolicyName::StaticOracle);
    if !loads_ahead {
        assert_eq!(outcome.moved_bytes(), misses_bytes, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn reported_changes_match_the_cached_experts(made in traces(6), budget in 0u64..70, mixed: bool) {
        let batches = batches(&made, |layer, expert| {
            if mixed { u64::from(1 + u32::from(layer) * 2 + expert % 2) } else { 3 }
        });
        for policy in policies() {
            check_slots(&batches, policy, budget);
        }
    }

    /// Requires equal sizes and batches within the budget. Static policies are excluded because they load without a look-up,
    /// layered ones because they may exceed the budget.
    #[test]
    fn no_policy_beats_belady(made in traces(4), slots in 4u64..20) {
        let batches = batches(&made, |_, _| 5);
        let best = hits(&batches, PolicyName::Belady, 5 * slots);
        for online in OnlinePolicy::ALL {
            let online = PolicyName::Shared(online);
            prop_assert!(hits(&batches, online, 5 * slots) <= best, "{}", online);
        }
        prop_assert_eq!(hits(&batches, PolicyName::BeladySize, 5 * slots), best);
    }

    /// Including batches larger than the budget.
    #[test]
    fn lru_curve_equals_replay(made in traces(7)) {
        let batches = batches(&made, |_, _| 5);
        let curve = LruCurve::new(&batches).unwrap();
        let experts = batches.experts();
        for budget in 0..=5 * u64::from(N_EXPERT) * u64::from(N_LAYER) + 6 {
            let lru = PolicyName::Shared(OnlinePolicy::Lru);
            let mut policy = PolicyInputs::default().policy(lru, experts, budget).unwrap();
            prop_assert_eq!(curve.outcome(budget), replay(&batches, policy.as_mut()));
        }
    }

    /// Stack policies: with one look-up per batch, a larger cache never has fewer hits.
    #[test]
    fn larger_budget_never_has_fewer_hits(made in traces(1)) {
        let batches = batches(&made, |_, _| 1);
        for policy in [PolicyName::Belady, PolicyName::Shared(OnlinePolicy::Lru), PolicyName::StaticOracle] {
            let hits: Vec<u64> = (0..26).map(|budget| hits(&batches, policy, budget)).collect();
            prop_assert!(hits.is_sorted(), "{} {:?}", policy, hits);
        }
    }
}

/// Two tokens in two layers without repeated experts. Loading an expert takes a second.
fn two_tokens() -> Batches {
    let made: Vec<SyntheticBatch> = [(0, 0), (1, 0), (0, 1), (1, 1)]
        .map(|(layer, expert)| (layer, Phase::Generate, vec![expert]))
        .into();
    batches_of(&made, 2, 2, |_, _| 10)
}

/// An interconnect of 10 bytes/s, and layers with these windows.
fn link(windows_s: &[f64]) -> PrefetchOptions {
    PrefetchOptions {
        link_bytes_per_s: 10.0,
        link_latency_s: 0.0,
        windows_s: windows_s.to_vec(),
        depth: 1,
        n_predict: None,
    }
}

/// Prefetching with a cache of 0 bytes, so that every look-up needs the interconnect.
fn prefetched(
    batches: &Batches,
    name: Option<PredictorName>,
    windows_s: [f64; 2],
) -> PrefetchOutcome {
    let lru = PolicyName::Shared(OnlinePolicy::Lru);
    let experts = batches.experts();
    let mut policy = PolicyInputs::default().policy(lru, experts, 0).unwrap();
    let how = link(&windows_s);
    match name {
        Some(name) => {
            let mut predictor = name.predictor(experts, how.depth);
            prefetch(batches, policy.as_mut(), predictor.as_mut(), &how)
        }
        None => prefetch(
            batches,
            policy.as_mut(),
            &mut batches.to_predictions(),
            &how,
        ),
    }
}

/// The first expert takes one second. Each further expert is requested when the previous layer starts and takes one second:
/// it is timely in a window of two seconds, and half a second late in a window of half a second.
#[test]
fn correct_predictions_are_timely_or_late() {
    let batches = two_tokens();
    let right = PrefetchOutcome {
        passes: 4,
        look_ups: 4,
        missed: 1,
        predicted: 3,
        correct: 3,
        moved_bytes: 40,
        ..PrefetchOutcome::default()
    };
    let timely = PrefetchOutcome {
        timely: 3,
        stall_s: 1.0,
        compute_s: 8.0,
        ..right
    };
    assert_eq!(prefetched(&batches, None, [2.0, 2.0]), timely);
    let late = PrefetchOutcome {
        late: 3,
        stall_s: 2.5,
        compute_s: 2.0,
        ..right
    };
    assert_eq!(prefetched(&batches, None, [0.5, 0.5]), late);
    // Requests during the long window are timely, those during the short window are late.
    let mixed = PrefetchOutcome {
        timely: 2,
        late: 1,
        stall_s: 1.5,
        compute_s: 5.0,
        ..right
    };
    assert_eq!(prefetched(&batches, None, [2.0, 0.5]), mixed);
}

/// The experts of the previous token are always wrong. The last requests are for a token that does not exist.
#[test]
fn wrong_predictions_are_wasted() {
    let result = prefetched(&two_tokens(), Some(PredictorName::Previous), [2.0, 2.0]);
    let wrong = PrefetchOutcome {
        passes: 4,
        look_ups: 4,
        missed: 4,
        wasted: 3,
        predicted: 2,
        moved_bytes: 70,
        stall_s: 4.0,
        compute_s: 8.0,
        ..PrefetchOutcome::default()
    };
    assert_eq!(result, wrong);
}

/// A model that selects the same experts in a cycle. After one cycle all transitions are known.
#[test]
fn markov_learns_transitions() {
    let made: Vec<SyntheticBatch> = (0..40)
        .map(|i| {
            let token = i / 2;
            (i as u16 % 2, Phase::Generate, vec![token % 4 + (i % 2) * 4])
        })
        .collect();
    let batches = batches_of(&made, 2, 8, |_, _| 1);
    let result = prefetched(&batches, Some(PredictorName::Markov), [2.0, 2.0]);
    // Layer 1 follows layer 0 of the same token, layer 0 follows layer 1 of the previous token. Known from the second cycle
    // on.
    assert_eq!(result.look_ups, 40);
    assert_eq!(result.correct, 4 * 4 + 4 * 4 - 1);
    assert_eq!(result.missed, 40 - result.correct);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Only look-ups change the cache, so prefetching does not change the number of hits.
    #[test]
    fn every_look_up_has_exactly_one_outcome(made in traces(4), budget in 0u64..70, depth in 1usize..3) {
        let batches = batches(&made, |_, _| 3);
        let experts = batches.experts();
        let lru = || {
            PolicyInputs::default().policy(PolicyName::Shared(OnlinePolicy::Lru), experts, budget).unwrap()
        };
        let plain = replay(&batches, lru().as_mut());
        for name in PredictorName::ALL {
            let mut predictor = name.predictor(experts, depth);
            let how = PrefetchOptions { depth, ..link(&[2.0, 0.5, 1.0]) };
            let result = prefetch(&batches, lru().as_mut(), predictor.as_mut(), &how);
            prop_assert_eq!(result.hits, plain.hits[1]);
            prop_assert_eq!(result.look_ups, plain.look_ups[1]);
            let four = result.hits + result.timely + result.late + result.missed;
            prop_assert_eq!(four, result.look_ups);
            let loaded = result.timely + result.late + result.missed + result.wasted;
            prop_assert_eq!(loaded * 3, result.moved_bytes);
            prop_assert!(result.stall_s >= 0.0 && result.correct <= result.predicted);
        }
    }
}

/// Independent, uniformly distributed look-ups of N experts: every cache of c experts has the hit rate c / N.
#[test]
fn uniform_look_ups_hit_in_proportion_to_size() {
    const N: u32 = 64;
    let mut state = 1u64;
    let made: Vec<SyntheticBatch> = (0..60_000)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (0, Phase::Generate, vec![(state >> 58) as u32 % N])
        })
        .collect();
    let batches = batches_of(&made, 1, N, |_, _| 1);
    for slots in [8u64, 16, 48] {
        for online in OnlinePolicy::ALL {
            let hits = hits(&batches, PolicyName::Shared(online), slots) as f64;
            let share = hits / made.len() as f64;
            let expected = slots as f64 / f64::from(N);
            // Four standard deviations of the mean are at most 0.0082.
            assert!(
                (share - expected).abs() < 0.0082,
                "{online:?} {slots} {share}"
            );
        }
    }
}

/// A cycle that is one expert longer than the cache: LRU evicts each expert just before its next look-up.
#[test]
fn lru_has_no_hits_on_long_cycle() {
    let made: Vec<SyntheticBatch> = (0..24 * 10)
        .map(|i| ((i / 8 % 3) as u16, Phase::Generate, vec![i % 8]))
        .collect();
    let batches = batches(&made, |_, _| 1);
    let lru = PolicyName::Shared(OnlinePolicy::Lru);
    assert_eq!(hits(&batches, lru, 23), 0);
    assert_eq!(hits(&batches, lru, 24), 24 * 9);
    assert!(hits(&batches, PolicyName::Belady, 23) > 24 * 8);
    assert_eq!(
        batches.cycle_bytes(),
        3,
        "one expert in each of three layers"
    );
}

/// Without timestamps, a prompt is one batch per layer, independent of the order of its rows.
#[test]
fn prompt_without_timestamps_is_one_batch_per_layer() {
    let rows = |layer_major: bool| {
        let mut rows: Vec<RoutingRow> = (0..6u32)
            .flat_map(|token| {
                (0..2u16).flat_map(move |layer| {
                    (0..2).map(move |slot| RoutingRow {
                        token_id: TokenId(token),
                        sequence_id: Some(0),
                        phase: Some(if token < 4 {
                            Phase::Prompt
                        } else {
                            Phase::Generate
                        }),
                        slot,
                        expert_id: ExpertId((token * 3 + u32::from(slot + layer)) % N_EXPERT),
                        ..RoutingRow::at_layer(LayerId(layer))
                    })
                })
            })
            .collect();
        if layer_major {
            rows[..16].sort_by_key(|row| row.layer_id);
        }
        let mut collector = Collector::new();
        rows.iter().for_each(|row| collector.routing(row).unwrap());
        let sizes = (0..2).flat_map(|layer| {
            (0..N_EXPERT).map(move |expert| (LayerId(layer), ExpertId(expert), 1))
        });
        let batches = collector.finish(&sizes.collect()).unwrap();
        let cut = batches.iter().map(|batch| {
            let selections: Vec<(Key, bool)> = batch.selections().collect();
            (batch.phase(), batch.ends_request(), selections)
        });
        cut.collect::<Vec<_>>()
    };
    let by_token = rows(false);
    assert_eq!(by_token, rows(true));
    // Two batches of eight selections, then two tokens in two layers.
    let sizes: Vec<usize> = by_token
        .iter()
        .map(|(_, _, selections)| selections.len())
        .collect();
    assert_eq!(sizes, [8, 8, 2, 2, 2, 2]);
    // Tokens 0 to 3 in layer 0: 0 1, 3 4, 6 7, 1 2.
    let again: Vec<bool> = by_token[0].2.iter().map(|&(_, again)| again).collect();
    assert_eq!(
        again,
        [false, false, false, false, false, false, true, false]
    );
    assert!(by_token[5].1 && !by_token[4].1);
}
