//! Property tests: invariants of all inputs.

use moe_placement::learn::{LearnFile, parse_observations};
use moe_placement::plan::{
    Entry, ExpertSizes, LayerCurve, Plan, PlanVerdict, Strategy as LaneStrategy, Weighting, rank,
};
use moe_placement::update::{Cache, Update};
use moe_placement::{ExpertId, LayerId};
use proptest::prelude::*;
use serde_json::{Value, json};

const WEIGHTINGS: [Weighting; 5] = [
    Weighting::Flat,
    Weighting::Pressure,
    Weighting::Smooth,
    Weighting::Time,
    Weighting::Balanced,
];
const STRATEGIES: [LaneStrategy; 3] = [
    LaneStrategy::Warm,
    LaneStrategy::HotEven,
    LaneStrategy::EvenSplit,
];

fn counts() -> impl Strategy<Value = Vec<(u32, u64)>> {
    prop::collection::vec((0u32..8, 0u64..1000), 0..8)
}

prop_compose! {
    fn layer()(
        id in 0u32..5, calls in 0u64..100, raw in counts(), hot in counts(), cold in counts(), wait in 0u32..5000,
        form in 0u8..4,
    ) -> Value {
        let mut layer = json!({"layer": id, "calls": calls, "hot_slots_total": 3, "cold_slots_total": 9,
            "hot_slot_ratio": 0.25, "cold_slots_per_call": f64::from(wait) / 16.0, "experts": raw});
        if form & 1 != 0 {
            layer["hot_experts"] = json!(hot);
            layer["cold_experts"] = json!(cold);
        }
        if form & 2 != 0 {
            layer["parallel_join_wait_time_per_call_us"] = json!(f64::from(wait) / 7.0);
            layer["a key of tomorrow"] = json!(wait);
        }
        layer
    }
}

prop_compose! {
    fn learn_file()(layers in prop::collection::vec(layer(), 0..6), updates in 0u64..50) -> LearnFile {
        let file = json!({"enabled": true, "schema": "llama.cpp.moe_layer_opt_perf.v1", "updates": updates,
            "summary": {"layer_calls": updates, "hot_slot_ratio": 0.5, "total_moe_time_per_call_us": 2.5},
            "layers": layers});
        LearnFile::parse(&file.to_string()).unwrap()
    }
}

/// Two merged files, written and parsed again.
fn merged(one: &LearnFile, other: &LearnFile) -> LearnFile {
    let mut sum = one.clone();
    sum.merge(other).unwrap();
    LearnFile::parse(&sum.to_json()).unwrap()
}

fn total_hits(file: &LearnFile) -> u64 {
    let layers = file.observations().unwrap();
    layers
        .iter()
        .flat_map(|layer| &layer.experts)
        .map(|expert| expert.hits())
        .sum()
}

proptest! {
    #[test]
    fn merging_is_associative_and_keeps_all_hits(a in learn_file(), b in learn_file(), c in learn_file()) {
        let left = merged(&merged(&a, &b), &c);
        let right = merged(&a, &merged(&b, &c));
        prop_assert_eq!(left.to_json(), right.to_json());
        prop_assert_eq!(total_hits(&left), total_hits(&a) + total_hits(&b) + total_hits(&c));
    }

    #[test]
    fn plans_stay_within_budget(
        file in learn_file(),
        weighting in 0usize..5,
        curve in -0.5f64..1.5,
        sizes in prop::collection::vec(((0u16..5).prop_map(LayerId), (0u32..8).prop_map(ExpertId), 0u64..40), 0..30),
        budgets in prop::collection::vec(0u64..200, 1..4),
        strategy in 0usize..3,
        fill in prop::option::of(any::<u64>()),
    ) {
        let ranking = rank(&file.observations().unwrap(), WEIGHTINGS[weighting], LayerCurve::new(curve));
        let by_rank = |entry: &Entry| (std::cmp::Reverse(entry.score), entry.layer, entry.expert);
        prop_assert!(ranking.is_sorted_by_key(by_rank));
        let sizes: ExpertSizes = sizes.into_iter().collect();
        let plan = Plan::new(&ranking, &sizes, &budgets, STRATEGIES[strategy], fill).unwrap();

        let mut seen = std::collections::BTreeSet::new();
        for (lane, &budget) in plan.lanes.iter().zip(&budgets) {
            // The size of every expert, plus the size of the first expert of each layer.
            let mut layers = std::collections::BTreeSet::new();
            let mut bytes = 0;
            for selected in &lane.selected {
                let (layer, expert) = (selected.entry.layer, selected.entry.expert);
                prop_assert!(seen.insert((layer, expert)), "an expert twice");
                prop_assert_eq!(sizes.get(layer, expert), Some(selected.bytes));
                bytes += if layers.insert(layer) { 2 * selected.bytes } else { selected.bytes };
            }
            prop_assert_eq!(bytes, lane.used_bytes);
            prop_assert!(lane.used_bytes <= budget);
        }
        let taken = plan.decisions.iter().filter(|d| matches!(d.verdict, PlanVerdict::Taken { .. }));
        prop_assert_eq!(taken.count(), seen.len());
        prop_assert!(plan.decisions.len() >= ranking.len());
    }

    /// A larger budget can drop experts (see `larger_budget_can_drop_an_expert`), but none ranked before the first that did
    /// not fit.
    #[test]
    fn larger_budget_keeps_experts_before_first_miss(
        file in learn_file(),
        sizes in prop::collection::vec(1u64..40, 40),
        budget in 0u64..300,
        more in 0u64..100,
    ) {
        let ranking = rank(&file.observations().unwrap(), Weighting::Flat, LayerCurve::DEFAULT);
        let sizes: ExpertSizes = sizes
            .iter()
            .enumerate()
            .map(|(i, &bytes)| (LayerId(i as u16 / 8), ExpertId(i as u32 % 8), bytes))
            .collect();
        let plan = |budget| Plan::new(&ranking, &sizes, &[budget], LaneStrategy::Warm, None).unwrap();
        let before = plan(budget);
        let kept = before.decisions.iter().take_while(|d| !matches!(d.verdict, PlanVerdict::NoRoom { .. }));
        let after = plan(budget + more);
        for decision in kept.filter(|d| matches!(d.verdict, PlanVerdict::Taken { .. })) {
            prop_assert!(after.selected().any(|(_, selected)| selected.entry == decision.entry));
        }
    }

    /// An update keeps the number of experts of each layer, and evicts only cached experts.
    #[test]
    fn updates_keep_number_of_experts_per_layer(
        file in learn_file(),
        cached in prop::collection::btree_set(
            ((0u16..5).prop_map(LayerId), (0u32..8).prop_map(ExpertId)),
            0..20,
        ),
        rate in -0.5f64..1.5,
    ) {
        let ranking = rank(&file.observations().unwrap(), Weighting::Time, LayerCurve::DEFAULT);
        let cache: Cache = cached.iter().copied().collect();
        let update = Update::new(&cache, &ranking, &[], 8, rate);
        let mut after = cached.clone();
        for exchange in update.exchanges() {
            prop_assert!(after.remove(&(exchange.layer, exchange.evict)));
            prop_assert!(after.insert((exchange.layer, exchange.add)));
        }
        prop_assert_eq!(after.len(), cached.len());
    }

    /// Parsing a mutated file never panics. A parsed file can be written, merged, filtered and planned.
    #[test]
    fn mutated_files_never_panic(
        file in learn_file(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..4),
        snippet in "[-0-9eE.\\[\\]{},:\"nul]{0,6}",
    ) {
        let mut bytes = file.to_json().into_bytes();
        for (index, byte, kind) in changes {
            let at = index.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => { bytes.remove(at); }
                _ => { bytes.splice(at..at, snippet.bytes()); }
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        if let Ok(parsed) = LearnFile::parse(&text) {
            let again = parse_observations(&parsed.to_json()).unwrap();
            prop_assert_eq!(&again, &parsed.observations().unwrap());
            for weighting in WEIGHTINGS {
                rank(&again, weighting, LayerCurve::new(1.0));
            }
            let mut sum = file.clone();
            if sum.merge(&parsed).is_ok() {
                parse_observations(&sum.to_json()).unwrap();
            }
            parsed.filter(|layer, expert| (u32::from(layer.0) + expert.0) % 2 == 0).observations().unwrap();
        }
        let _ = ExpertSizes::from_csv(&text);
    }

    #[test]
    fn mutated_sizes_never_panic(text in "(layer,expert,bytes\n)?[-0-9a-z,. \r\n]{0,80}") {
        let _ = ExpertSizes::from_csv(&text);
    }
}
