//! Updates of a running hot cache.

use moe_placement::learn::LayerSlots;
use moe_placement::plan::Entry;
use moe_placement::update::{Cache, Exchange, Update, max_exchange};
use moe_placement::{ExpertId, LayerId};

#[test]
fn max_exchange_matches_published_values() {
    assert_eq!(max_exchange(0.25, 10, 8), 3);
    assert_eq!(max_exchange(1.5, 10, 8), 8);
    assert_eq!(max_exchange(-1.0, 10, 8), 0);
    assert_eq!(max_exchange(0.25, 0, 8), 0);
    assert_eq!(max_exchange(1.0, 2, 1), 1);
    assert_eq!(max_exchange(f64::NAN, 10, 8), 0);
}

fn cache(experts: impl IntoIterator<Item = (u16, u32)>) -> Cache {
    let experts = experts.into_iter();
    experts
        .map(|(layer, expert)| (LayerId(layer), ExpertId(expert)))
        .collect()
}

fn entries(scores: &[(u16, u32, u64)]) -> Vec<Entry> {
    let entry = |&(layer, expert, score)| Entry {
        layer: LayerId(layer),
        expert: ExpertId(expert),
        hits: score,
        score,
    };
    scores.iter().map(entry).collect()
}

fn tuples(exchanges: &[Exchange]) -> Vec<(u16, u32, u32, u64)> {
    let tuple = |e: &Exchange| (e.layer.0, e.evict.0, e.add.0, e.gain());
    exchanges.iter().map(tuple).collect()
}

/// Layer 0 contains 0, 1 and 2, of which only 0 stays. 8 (score 9 in two entries) and 5 (score 7) replace 1 (no score) and 2
/// (score 3). Layer 1 contains 4, which ties with 3; the lower id wins, with a gain of 0. In layer 2 no expert was selected.
/// Layer 3 is not in the cache.
#[test]
fn exchanges_experts_with_low_scores() {
    let cache = cache([(0, 0), (0, 1), (0, 2), (1, 4), (2, 6)]);
    let scores = entries(&[
        (0, 0, 20),
        (0, 8, 4),
        (0, 8, 5),
        (0, 5, 7),
        (0, 2, 3),
        (0, 99, 50),
        (1, 3, 6),
        (1, 4, 6),
        (3, 0, 100),
    ]);
    let slots = [
        LayerSlots {
            layer: LayerId(0),
            hot: 23,
            cold: 17,
        },
        LayerSlots {
            layer: LayerId(3),
            hot: 0,
            cold: 60,
        },
    ];
    let update = |rate| Update::new(&cache, &scores, &slots, 64, rate);
    let all = update(1.0);
    assert_eq!(
        tuples(&all.candidates),
        [(0, 1, 8, 9), (0, 2, 5, 4), (1, 4, 3, 0)]
    );
    assert_eq!(all.hot_experts, 4, "layer 2 has no selections");
    assert_eq!(
        all.exchanges(),
        all.candidates,
        "exchanges with a gain of 0 are included"
    );
    assert_eq!(all.hit_rate(), 0.23);
    // 0.25 × 4 is 1; 0.26 × 4 is rounded up to 2.
    assert_eq!(tuples(update(0.25).exchanges()), [(0, 1, 8, 9)]);
    assert_eq!(update(0.26).exchanges().len(), 2);
    assert!(update(0.0).exchanges().is_empty());
}

#[test]
fn ignores_expert_ids_above_limit() {
    let cache = cache([(0, 0)]);
    let scores = entries(&[(0, 99, 50), (0, 0, 1)]);
    assert!(
        Update::new(&cache, &scores, &[], 64, 1.0)
            .candidates
            .is_empty()
    );
    assert_eq!(
        tuples(&Update::new(&cache, &scores, &[], 100, 1.0).candidates),
        [(0, 0, 99, 49)]
    );
}
