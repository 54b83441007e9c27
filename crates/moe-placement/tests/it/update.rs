//! Updates of a running hot cache.

use moe_placement::learn::{LayerSlots, parse_observations};
use moe_placement::plan::{Entry, LayerCurve, Weighting, rank};
use moe_placement::update::{Cache, Exchange, Payback, Update, max_exchange};
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

/// 1 GB/s from CPU memory, 10 GB/s from GPU memory, 0.5 GB/s for uploads: an exchange of an expert of b bytes takes 2b ns, and
/// each further selection saves 0.9b ns.
const PAYBACK: Payback = Payback {
    horizon: 100.0,
    cold: 1e9,
    hot: 10e9,
    upload: 0.5e9,
};

#[test]
fn payback_compares_saved_time_with_upload() {
    // 100 tokens with 3 more selections in 10 tokens: 30 reads at 0.9 ns per byte.
    assert!((PAYBACK.saving_s(3, 10, 1_000) - 27e-6).abs() < 1e-18);
    assert_eq!(PAYBACK.upload_s(1_000), 2e-6);
    let slower = Payback {
        hot: 0.5e9,
        ..PAYBACK
    };
    assert!(slower.saving_s(3, 10, 1_000) < 0.0);
    assert_eq!(PAYBACK.saving_s(0, 0, 1_000), 0.0);
}

/// Expert 0 is cached and selected twice in 1,000 tokens. Expert 1 gains 998 selections, expert 3 gains 22 over expert 2. With
/// a horizon of 100 tokens, an exchange must gain 23 selections.
#[test]
fn payback_keeps_experts_whose_upload_costs_more() {
    let learn = r#"{"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": [
        {"layer": 0, "experts": [[0, 2], [1, 1000]]}, {"layer": 1, "experts": [[2, 5], [3, 27]]}]}"#;
    let observations = parse_observations(learn).unwrap();
    let cache = cache([(0, 0), (1, 2)]);
    let ranking = rank(&observations, Weighting::Flat, LayerCurve::DEFAULT);
    let update = Update::new(&cache, &ranking, &[], 4, 1.0);
    assert_eq!(update.exchanges().len(), 2);
    let paying = |payback: &Payback, bytes: u64| {
        let exchanges = update.paying(payback, &observations, 1_000, |_, _| bytes);
        exchanges.iter().map(|e| e.add.0).collect::<Vec<_>>()
    };
    assert_eq!(paying(&PAYBACK, 4_096), [1]);
    let longer = Payback {
        horizon: 102.0,
        ..PAYBACK
    };
    assert_eq!(paying(&longer, 4_096), [1, 3]);
    assert!(paying(&longer, 0).is_empty(), "an expert without a size");
    let same = Payback {
        hot: PAYBACK.cold,
        ..PAYBACK
    };
    assert!(paying(&same, 4_096).is_empty());
    let halved = Update::new(&cache, &ranking, &[], 4, 0.5);
    let exchanges = halved.paying(&longer, &observations, 1_000, |_, _| 1);
    assert_eq!(exchanges.len(), 1, "the update rate applies, too");
}
