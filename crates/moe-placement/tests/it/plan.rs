//! Plans: 40 cases with the fork's results, its published test vectors, and manually computed results.

use moe_placement::learn::{LearnFile, parse_observations};
use moe_placement::plan::{
    Entry, Error, ExpertSizes, Explanation, LayerCurve, Plan, PlanVerdict, Strategy, Weighting,
    rank,
};
use moe_placement::{ExpertId, LayerId};
use serde::Deserialize;
use serde_json::{Value, json};

/// A case of `hot-cache-plans` in `fixtures/reference`, with the results of the fork's parser, weighting and planner.
#[derive(Deserialize)]
struct Case {
    learn: Value,
    weighting: String,
    layer_curve: f64,
    sizes: Vec<(LayerId, ExpertId, u64)>,
    lane_budgets: Vec<u64>,
    strategy: String,
    expected: Expected,
}

#[derive(Deserialize)]
struct Expected {
    ranking: Vec<(u16, u32, u64)>,
    lanes: Vec<ExpectedLane>,
}

#[derive(Debug, Deserialize, PartialEq)]
struct ExpectedLane {
    selected: Vec<(u16, u32)>,
    used_bytes: u64,
}

fn cases() -> Vec<Case> {
    serde_json::from_slice(&moe_testkit::reference::read("hot-cache-plans")).unwrap()
}

impl Case {
    fn ranking(&self) -> Vec<Entry> {
        let observations = parse_observations(&self.learn.to_string()).unwrap();
        rank(
            &observations,
            self.weighting.parse().unwrap(),
            LayerCurve::new(self.layer_curve),
        )
    }

    fn sizes(&self) -> ExpertSizes {
        self.sizes.iter().copied().collect()
    }

    fn plan(&self) -> Plan {
        Plan::new(
            &self.ranking(),
            &self.sizes(),
            &self.lane_budgets,
            self.strategy.parse().unwrap(),
            None,
        )
        .unwrap()
    }
}

fn pairs(entries: impl IntoIterator<Item = Entry>) -> Vec<(u16, u32)> {
    entries
        .into_iter()
        .map(|entry| (entry.layer.0, entry.expert.0))
        .collect()
}

#[test]
fn matches_the_fork_in_40_cases() {
    let cases = cases();
    assert_eq!(cases.len(), 40);
    for (number, case) in cases.iter().enumerate() {
        let ranking: Vec<_> = case
            .ranking()
            .iter()
            .map(|entry| (entry.layer.0, entry.expert.0, entry.score))
            .collect();
        assert_eq!(ranking, case.expected.ranking, "ranking of case {number}");
        let lanes: Vec<ExpectedLane> = case
            .plan()
            .lanes
            .iter()
            .map(|lane| ExpectedLane {
                selected: pairs(lane.selected.iter().map(|selected| selected.entry)),
                used_bytes: lane.used_bytes,
            })
            .collect();
        assert_eq!(lanes, case.expected.lanes, "lanes of case {number}");
    }
}

/// With one lane, a learn file filtered to a plan makes the fork load exactly this plan. The cost of layers does not
/// depend on the order.
#[test]
fn filtered_file_yields_same_plan() {
    for (number, case) in cases()
        .iter()
        .enumerate()
        .filter(|(_, case)| case.lane_budgets.len() == 1)
    {
        let plan = case.plan();
        let mut selected = pairs(plan.selected().map(|(_, s)| s.entry));
        selected.sort_unstable();
        let learn = LearnFile::parse(&case.learn.to_string()).unwrap();
        let filtered = learn.filter(|layer, expert| selected.contains(&(layer.0, expert.0)));
        let again = Case {
            learn: serde_json::from_str(&filtered.to_json()).unwrap(),
            ..serde_json::from_value(json!({
                "learn": null, "weighting": case.weighting, "layer_curve": case.layer_curve, "sizes": case.sizes,
                "lane_budgets": case.lane_budgets, "strategy": case.strategy,
                "expected": {"ranking": [], "lanes": []}}))
            .unwrap()
        };
        let mut found = pairs(again.plan().selected().map(|(_, selected)| selected.entry));
        found.sort_unstable();
        assert_eq!(found, selected, "case {number}");
    }
}

fn ranked(layers: Value, weighting: Weighting, curve: f64) -> Vec<(u16, u32, u64)> {
    let text = json!({"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": layers}).to_string();
    let ranking = rank(
        &parse_observations(&text).unwrap(),
        weighting,
        LayerCurve::new(curve),
    );
    ranking
        .iter()
        .map(|entry| (entry.layer.0, entry.expert.0, entry.score))
        .collect()
}

/// The fork's unit tests. Weights with mean wait 15: 1 + (20/15 - 1)/2 = 1.1667 and max(0.8333, 0.85).
#[test]
fn pressure_matches_published_scores() {
    let wait = "parallel_join_wait_time_per_call_us";
    let raw = json!([{"layer": 0, wait: 20, "experts": [[3, 10]]}, {"layer": 1, wait: 10, "experts": [[4, 11]]}]);
    for curve in [0.5, -0.1, 1.1] {
        // A curve out of range counts as 0.5.
        assert_eq!(
            ranked(raw.clone(), Weighting::Pressure, curve),
            [(0, 3, 12), (1, 4, 9)]
        );
    }
    assert_eq!(
        ranked(raw, Weighting::Pressure, 0.0),
        [(1, 4, 11), (0, 3, 10)]
    );

    let split = json!([
        {"layer": 0, wait: 20, "hot_experts": [[1, 10]], "cold_experts": [[2, 10]]},
        {"layer": 1, wait: 10, "hot_experts": [[5, 12]]},
    ]);
    assert_eq!(
        ranked(split, Weighting::Pressure, 0.5),
        [(0, 1, 12), (0, 2, 12), (1, 5, 11)]
    );
}

/// Two layers with 3 and 1 experts. `flat` ranks the best experts of all layers first, `balanced` the layer with more
/// experts.
#[test]
fn flat_and_balanced_rank_by_position() {
    let layers = json!([
        {"layer": 7, "experts": [[0, 5], [1, 2_000_000], [2, 5]]},
        {"layer": 2, "experts": [[9, 1]]},
    ]);
    assert_eq!(
        ranked(layers.clone(), Weighting::Flat, 0.5),
        [
            (7, 1, 3_999_999),
            (2, 9, 3_000_001),
            (7, 0, 2_000_005),
            (7, 2, 1_000_005)
        ]
    );
    assert_eq!(
        ranked(layers, Weighting::Balanced, 0.5),
        [
            (7, 1, 3_999_999),
            (7, 0, 2_000_005),
            (7, 2, 1_000_005),
            (2, 9, 1_000_001)
        ]
    );
}

/// Pressures 10, 20 and 50. `smooth`: percentiles 12 and 44, so 1, 1 + 0.3 √(8/32) and 1.3. `time`: 0.4, 0.4 + 1.4/4 and
/// 1.8.
#[test]
fn smooth_and_time_weight_layers() {
    let (wait, total) = (
        "parallel_join_wait_time_per_call_us",
        "total_moe_time_per_call_us",
    );
    let waits = json!([
        {"layer": 0, wait: 10, "experts": [[0, 100]]},
        {"layer": 1, wait: 20, "experts": [[0, 100]]},
        {"layer": 2, "parallel_cold_lane_wall_time_per_call_us": 80, "parallel_hot_lane_wall_time_per_call_us": 30,
         "experts": [[0, 100]]},
        {"layer": 3, "experts": [[0, 99]]},
    ]);
    assert_eq!(
        ranked(waits, Weighting::Smooth, 1.0),
        [(2, 0, 130), (1, 0, 115), (0, 0, 100), (3, 0, 99)]
    );
    let times = json!([
        {"layer": 0, total: 10, "experts": [[0, 100]]},
        {"layer": 1, wait: 20, "experts": [[0, 100]]},
        {"layer": 2, total: 50, wait: 1000, "experts": [[0, 100]]},
        {"layer": 3, "experts": [[0, 99]]},
    ]);
    assert_eq!(
        ranked(times, Weighting::Time, 1.0),
        [(2, 0, 180), (3, 0, 99), (1, 0, 75), (0, 0, 40)]
    );
}

#[test]
fn parses_names_and_aliases() {
    let names = [
        (Weighting::Flat, vec!["flat"]),
        (Weighting::Pressure, vec!["pressure"]),
        (
            Weighting::Smooth,
            vec![
                "smooth",
                "smooth-pressure",
                "capped",
                "capped-pressure",
                "soft-pressure",
            ],
        ),
        (Weighting::Time, vec!["time", "moe-time", "decode-time"]),
        (Weighting::Balanced, vec!["balanced", "rank", "layer-rank"]),
    ];
    for (weighting, names) in names {
        for name in names {
            assert_eq!(name.parse::<Weighting>().unwrap(), weighting);
        }
    }
    assert!(matches!(
        "smooth_pressure".parse::<Weighting>(),
        Err(Error::Weighting { .. })
    ));
    assert!(matches!(
        "even".parse::<Strategy>(),
        Err(Error::Strategy { .. })
    ));
}

/// A ranking in the order of the experts given.
fn ranking(experts: &[(u16, u32)]) -> Vec<Entry> {
    let scores = (1..=experts.len() as u64).rev();
    let entry = |(&(layer, expert), score)| Entry {
        layer: LayerId(layer),
        expert: ExpertId(expert),
        hits: score,
        score,
    };
    experts.iter().zip(scores).map(entry).collect()
}

fn sizes(experts: impl IntoIterator<Item = (u16, u32, u64)>) -> ExpertSizes {
    let experts = experts.into_iter();
    experts
        .map(|(layer, expert, bytes)| (LayerId(layer), ExpertId(expert), bytes))
        .collect()
}

fn even_sizes(n_layer: u16, n_expert: u32, bytes: u64) -> ExpertSizes {
    let layers =
        (0..n_layer).flat_map(|layer| (0..n_expert).map(move |expert| (layer, expert, bytes)));
    sizes(layers)
}

fn selected(plan: &Plan) -> Vec<Vec<(u16, u32)>> {
    let lane = |lane: &moe_placement::plan::Lane| pairs(lane.selected.iter().map(|s| s.entry));
    plan.lanes.iter().map(lane).collect()
}

#[test]
fn packing_matches_published_example() {
    let sizes = even_sizes(2, 2, 10);
    let plan = Plan::new(
        &ranking(&[(0, 0), (0, 1), (1, 0)]),
        &sizes,
        &[30],
        Strategy::Warm,
        None,
    )
    .unwrap();
    assert_eq!(selected(&plan), [[(0, 0), (0, 1)]]);
    assert_eq!(plan.used_bytes(), 30);
}

/// Experts of 10 bytes. Each lane contains an empty expert per layer.
#[test]
fn strategies_distribute_experts_over_lanes() {
    let order = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)];
    let (sizes, ranking) = (even_sizes(2, 3, 10), ranking(&order));
    let plan = |strategy, budgets: &[u64]| {
        let plan = Plan::new(&ranking, &sizes, budgets, strategy, None).unwrap();
        selected(&plan)
    };
    // 20 + 20 fill the first lane. In the second lane, (0, 1) costs 20 again.
    assert_eq!(
        plan(Strategy::Warm, &[40, 40]),
        [vec![(0, 0), (1, 0)], vec![(0, 1), (1, 1)]]
    );
    // The first lane has free memory for one more expert.
    assert_eq!(
        plan(Strategy::Warm, &[50, 20]),
        [vec![(0, 0), (1, 0), (0, 1)], vec![(1, 1)]]
    );
    // (1, 0) goes to the lane with fewer bytes, then each expert to the lane without experts of its layer.
    assert_eq!(
        plan(Strategy::HotEven, &[100, 100]),
        [vec![(0, 0), (1, 1), (0, 2)], vec![(1, 0), (0, 1)]]
    );
    // Half of the budget corresponds to one of two layers.
    assert_eq!(
        plan(Strategy::EvenSplit, &[40, 40]),
        [vec![(0, 0), (0, 1), (0, 2)], vec![(1, 0), (1, 1)]]
    );
    // A quarter of two layers is half a layer, rounded to one.
    assert_eq!(
        plan(Strategy::EvenSplit, &[20, 60]),
        [vec![(0, 0)], vec![(1, 0), (1, 1)]]
    );
    assert!(matches!(
        Plan::new(&ranking, &sizes, &[1; 4], Strategy::Warm, None),
        Err(Error::Lanes { n: 4 })
    ));
    assert!(matches!(
        Plan::new(&ranking, &sizes, &[], Strategy::Warm, None),
        Err(Error::Lanes { n: 0 })
    ));
}

/// With `flat` and experts of equal size, 50 bytes hold the best expert of two layers and the second-best of the first. 60
/// bytes hold the best experts of three layers, but not the second-best of the first.
#[test]
fn larger_budget_can_drop_an_expert() {
    let layers = json!([
        {"layer": 0, "experts": [[0, 9], [1, 8]]},
        {"layer": 1, "experts": [[0, 9]]},
        {"layer": 2, "experts": [[0, 9]]},
    ]);
    let text = json!({"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": layers}).to_string();
    let ranking = rank(
        &parse_observations(&text).unwrap(),
        Weighting::Flat,
        LayerCurve::DEFAULT,
    );
    let sizes = even_sizes(3, 2, 10);
    let plan =
        |budget| selected(&Plan::new(&ranking, &sizes, &[budget], Strategy::Warm, None).unwrap());
    assert_eq!(plan(50), [[(0, 0), (1, 0), (0, 1)]]);
    assert_eq!(plan(60), [[(0, 0), (1, 0), (2, 0)]]);
}

/// Ranked experts come first. Experts without selections follow in an order that depends only on the seed.
#[test]
fn fills_free_memory_only_with_seed() {
    let sizes = even_sizes(4, 16, 10);
    let observed = ranking(&[(0, 3), (1, 5)]);
    let plan = |fill, strategy, budgets: &[u64]| {
        Plan::new(&observed, &sizes, budgets, strategy, fill).unwrap()
    };
    assert_eq!(
        selected(&plan(None, Strategy::Warm, &[400])),
        [[(0, 3), (1, 5)]]
    );
    let filled = plan(Some(1), Strategy::Warm, &[400]);
    let all = &selected(&filled)[0];
    assert_eq!(all[..2], [(0, 3), (1, 5)]);
    assert_eq!(
        filled.used_bytes(),
        400,
        "the budget is an integer multiple of the size"
    );
    assert_eq!(filled, plan(Some(1), Strategy::Warm, &[400]));
    assert_ne!(
        selected(&filled),
        selected(&plan(Some(2), Strategy::Warm, &[400]))
    );
    let mut distinct = all.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), all.len());
    let split = plan(Some(1), Strategy::EvenSplit, &[200, 200]);
    assert!(
        split.lanes[0]
            .selected
            .iter()
            .all(|selected| selected.entry.layer < LayerId(2))
    );
    assert_eq!(split.used_bytes(), 400);
}

/// The largest expert of a layer may be the first one that is selected; its empty expert is then as large.
#[test]
fn all_experts_fit_into_the_bytes_of_all() {
    let sizes = sizes([(0, 0, 10), (0, 1, 30), (2, 0, 5), (2, 1, 5)]);
    let bytes = sizes.bytes_of_all();
    assert_eq!(bytes, 40 + 30 + 10 + 5);
    let largest_first = ranking(&[(0, 1), (0, 0), (2, 0), (2, 1)]);
    let plan = |bytes| Plan::new(&largest_first, &sizes, &[bytes], Strategy::Warm, None).unwrap();
    assert_eq!(plan(bytes).lanes[0].selected.len(), 4);
    assert_eq!(plan(bytes - 1).lanes[0].selected.len(), 3);
    assert_eq!(ExpertSizes::default().bytes_of_all(), 0);
}

#[test]
fn explains_why_experts_are_in_or_out() {
    let sizes = sizes([(0, 0, 10), (0, 1, 10), (1, 0, 30), (0, 2, 10)]);
    let ranking = ranking(&[(0, 0), (1, 0), (9, 9), (0, 1)]);
    let plan = Plan::new(&ranking, &sizes, &[70], Strategy::Warm, None).unwrap();
    let explain =
        |layer, expert| Explanation::new(&plan, &ranking, &sizes, LayerId(layer), ExpertId(expert));
    assert_eq!(
        explain(0, 0).to_string(),
        "expert 0 of layer 0 is in the cache: rank 1 of 4 (score 4, 4 activations); it uses 10 bytes of lane 0, plus 10 bytes for the empty \
         expert of its layer"
    );
    assert_eq!(
        explain(1, 0).verdict,
        Some(PlanVerdict::NoRoom {
            lane: 0,
            cost: 60,
            free: 50
        })
    );
    assert_eq!(
        explain(1, 0).to_string(),
        "expert 0 of layer 1 is not in the cache: rank 2 of 4 (score 3, 3 activations); it needs 60 bytes, but lane 0 had only \
         50 bytes left when its rank was reached"
    );
    assert_eq!(explain(9, 9).verdict, Some(PlanVerdict::UnknownSize));
    assert!(
        explain(0, 1).is_in()
            && explain(0, 1)
                .to_string()
                .ends_with("it uses 10 bytes of lane 0")
    );
    assert_eq!(
        explain(0, 2).to_string(),
        "expert 2 of layer 0 is not in the cache: it does not appear in the learn file"
    );
    for (layer, expert) in [(0, 3), (2, 0)] {
        assert!(
            explain(layer, expert)
                .to_string()
                .ends_with("does not appear in the learn file; the size of the expert is unknown")
        );
    }
}

#[test]
fn reads_sizes_from_csv_and_rejects_faults() {
    let sizes = ExpertSizes::from_csv("layer,expert,bytes\r\n0,1,5\r\n\n3, 2 ,7\n").unwrap();
    let numbers = |(layer, expert, bytes): (LayerId, ExpertId, u64)| (layer.0, expert.0, bytes);
    let found: Vec<_> = sizes.iter().map(numbers).collect();
    assert_eq!(found, [(0, 1, 5), (3, 2, 7)]);
    let faults = [
        ("", 1),
        ("layer,expert\n", 1),
        ("layer,expert,bytes\n0,1\n", 2),
        ("layer,expert,bytes\n0,1,5\n0,1,-5\n", 3),
        ("layer,expert,bytes\n\n0,1,0\n", 3),
        ("layer,expert,bytes\n0,1,5\n0,1,5\n", 3),
        ("layer,expert,bytes\n4294967296,1,5\n", 2),
    ];
    for (text, faulty) in faults {
        let error = ExpertSizes::from_csv(text).unwrap_err();
        assert!(
            matches!(error, Error::Sizes { line, .. } if line == faulty),
            "{text:?}: {error}"
        );
    }
}
