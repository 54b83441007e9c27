//! Counters of a running cache: their report, its JSON schema, and what the parser of learn files reads from it.

use std::thread;

use moe_placement::learn::{ExpertObservation, LayerSlots, LearnFile, parse_observations};
use moe_placement::perf::{Counters, LaneIndex, LayerCall, LayerTimes, PerfMode, SharedCounters};
use moe_placement::plan::{LayerCurve, Weighting, rank};
use moe_placement::update::{Cache, Update};
use moe_placement::{ExpertId, LayerId};
use proptest::prelude::*;
use serde_json::{Value, json};

use LaneIndex::{Cold, Hot0, Hot1, Hot2};

const TIMES: LayerTimes = LayerTimes {
    total: 9_000,
    routing: 1_000,
    worklist: 500,
    hot_lanes: [2_000, 0, 1_000],
    cold_lane: 4_000,
    join_wait: 2_500,
    region: 5_000,
    merge: 250,
};

/// Two tokens in layer 4 and one in layer 0. Ids outside 0..5 are not experts.
fn example(mode: PerfMode) -> Counters {
    let mut counters = Counters::new(mode, 5, 2);
    counters.start_pass();
    for (layer, ids, lanes) in [
        (4, &[1, 3, 4, 1][..], &[Hot0, Cold, Hot2, Hot0][..]),
        (0, &[0, -1, 5], &[Cold, Hot0, Cold]),
    ] {
        counters.add_call(&LayerCall {
            layer: LayerId(layer),
            ids,
            lanes,
            times: Some(&TIMES),
        });
    }
    counters
}

#[test]
fn text_equals_that_of_the_fork() {
    let expected = concat!(
        r#"{"enabled":true,"mode":"update","schema":"llama.cpp.moe_layer_opt_perf.v1","n_expert":5,"n_expert_used":2,"#,
        r#""updates":1,"overflow_resets":0,"summary":{"layer_calls":2,"hot_slot_ratio":0.6,"hot0_slots_total":2,"#,
        r#""hot0_slots_per_call":1.0,"hot1_slots_total":0,"hot1_slots_per_call":0.0,"hot2_slots_total":1,"#,
        r#""hot2_slots_per_call":0.5},"layers":["#,
        r#"{"layer":0,"calls":1,"hot_slots_total":0,"cold_slots_total":1,"hot_slots_per_call":0.0,"#,
        r#""cold_slots_per_call":1.0,"hot0_slots_total":0,"hot0_slots_per_call":0.0,"hot1_slots_total":0,"#,
        r#""hot1_slots_per_call":0.0,"hot2_slots_total":0,"hot2_slots_per_call":0.0,"hot_slot_ratio":0.0,"#,
        r#""experts":[[0,1]],"hot_experts":[],"cold_experts":[[0,1]]},"#,
        r#"{"layer":4,"calls":1,"hot_slots_total":3,"cold_slots_total":1,"hot_slots_per_call":3.0,"#,
        r#""cold_slots_per_call":1.0,"hot0_slots_total":2,"hot0_slots_per_call":2.0,"hot1_slots_total":0,"#,
        r#""hot1_slots_per_call":0.0,"hot2_slots_total":1,"hot2_slots_per_call":1.0,"hot_slot_ratio":0.75,"#,
        r#""experts":[[1,2],[3,1],[4,1]],"hot_experts":[[1,2],[4,1]],"cold_experts":[[3,1]]}]}"#,
    );
    let file = example(PerfMode::Update).to_learn_file();
    assert_eq!(file.to_json(), expected);
    assert_eq!(LearnFile::parse(expected).unwrap(), file);
}

#[test]
fn text_says_that_nothing_was_counted() {
    let counters = example(PerfMode::Off);
    assert_eq!(counters.updates(), 0);
    let expected =
        r#"{"enabled":false,"mode":"off","schema":"llama.cpp.moe_layer_opt_perf.v1","layers":[]}"#;
    assert_eq!(counters.to_learn_file().to_json(), expected);
    assert_eq!(LearnFile::parse(expected).unwrap().layer_slots(), None);
}

/// Keys of an object, in order.
fn keys(object: &Value) -> Vec<&str> {
    let keys = object.as_object().unwrap().keys();
    keys.map(String::as_str).collect()
}

#[test]
fn full_report_has_times_launches_and_fallbacks() {
    let mut counters = example(PerfMode::Full);
    counters.add_fallback(LayerId(4));
    let report: Value = serde_json::from_str(&counters.to_learn_file().to_json()).unwrap();
    let layer = &report["layers"][1];
    let expected = json!({
        "parallel_hot_lane_wall_time_per_call_us": 3.0,
        "parallel_cold_lane_wall_time_per_call_us": 4.0,
        "parallel_join_wait_time_per_call_us": 2.5,
        "total_moe_time_per_call_us": 9.0,
        "routing_time_per_call_us": 1.0,
        "worklist_time_per_call_us": 0.5,
        "merge_time_per_call_us": 0.25,
        "hot0_branch_time_per_call_us": 2.0,
        "hot1_branch_time_per_call_us": 0.0,
        "hot2_branch_time_per_call_us": 1.0,
        "parallel_region_wall_time_per_call_us": 5.0,
        "parallel_overlap_estimate_per_call_us": 2.0,
        "parallel_hot_launches": 2,
        "parallel_cold_launches": 1,
        "parallel_hot_skips_zero": 0,
        "parallel_cold_skips_zero": 0,
        "parallel_fallbacks": 1,
        "parallel_fallback_reasons": {"other": 1},
    });
    let names = keys(layer);
    let start = names.iter().position(|&name| name == "hot_slot_ratio");
    let end = names.iter().position(|&name| name == "experts").unwrap();
    assert_eq!(&names[start.unwrap() + 1..end], keys(&expected));
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&layer[key], value, "{key}");
    }
    assert_eq!(&names[end..], ["experts", "hot_experts", "cold_experts"]);

    let first = &report["layers"][0];
    assert_eq!(first["parallel_hot_skips_zero"], 1);
    assert_eq!(first["parallel_cold_launches"], 1);
    assert_eq!(first.get("parallel_fallback_reasons"), None);

    let summary = &report["summary"];
    assert_eq!(summary["total_moe_time_per_call_us"], 9.0);
    assert_eq!(summary["parallel_hot_launches"], 2);
    assert_eq!(summary["parallel_fallbacks"], 1);
    assert_eq!(summary.get("parallel_hot_skips_zero"), None);
}

#[test]
fn update_mode_ignores_times_and_fallbacks() {
    let mut counters = example(PerfMode::Update);
    counters.add_fallback(LayerId(9));
    counters.add_times(LayerId(9), &TIMES, 1);
    assert_eq!(counters, example(PerfMode::Update));
}

#[test]
fn averages_are_over_the_calls_of_a_layer() {
    let mut counters = Counters::new(PerfMode::Full, 4, 1);
    let call = LayerCall {
        layer: LayerId(2),
        ids: &[3],
        lanes: &[Hot1],
        times: None,
    };
    for total in [1_000, 2_000, 6_000] {
        counters.add_call(&call);
        let times = LayerTimes {
            total,
            ..Default::default()
        };
        counters.add_times(LayerId(2), &times, 1);
    }
    let report = counters.to_learn_file();
    let observation = &report.observations().unwrap()[0];
    assert_eq!(observation.total_moe_us, 3.0);
    let report: Value = serde_json::from_str(&report.to_json()).unwrap();
    assert_eq!(report["layers"][0]["hot1_slots_per_call"], 1.0);
    assert_eq!(report["layers"][0]["parallel_cold_skips_zero"], 3);
}

/// A measured call stands for several calls; the others have no times.
#[test]
fn averages_are_over_the_calls_that_times_stand_for() {
    let mut counters = Counters::new(PerfMode::Full, 4, 1);
    for _ in 0..20 {
        counters.add_call(&LayerCall {
            layer: LayerId(2),
            ids: &[3],
            lanes: &[],
            times: None,
        });
    }
    for (total, n_calls) in [(9_000, 1), (1_000, 8)] {
        let times = LayerTimes {
            total,
            cold_lane: total,
            ..Default::default()
        };
        counters.add_times(LayerId(2), &times, n_calls);
    }
    let report: Value = serde_json::from_str(&counters.to_learn_file().to_json()).unwrap();
    for part in [&report["layers"][0], &report["summary"]] {
        assert_eq!(part["total_moe_time_per_call_us"], 17.0 / 9.0);
        assert_eq!(part["parallel_overlap_estimate_per_call_us"], 17.0 / 9.0);
    }
    assert_eq!(report["layers"][0]["calls"], 20);
}

/// The waits of published test vectors of the parser, from counters that contain the same values.
#[test]
fn parser_derives_waits_from_report() {
    let mut counters = Counters::new(PerfMode::Full, 4, 2);
    let mut times = LayerTimes {
        join_wait: 18_000,
        ..Default::default()
    };
    let selections = [(1, Hot0, 14), (3, Hot0, 2), (3, Cold, 5), (2, Cold, 7)];
    let selections = selections.map(|(id, lane, n)| vec![(id, lane); n]).concat();
    let (ids, lanes): (Vec<i32>, Vec<LaneIndex>) = selections.into_iter().unzip();
    // 28 slots in 4 calls.
    for (ids, lanes) in ids.chunks(7).zip(lanes.chunks(7)) {
        counters.add_call(&LayerCall {
            layer: LayerId(1),
            ids,
            lanes,
            times: Some(&times),
        });
    }
    times = LayerTimes {
        hot_lanes: [10_000, 0, 0],
        cold_lane: 30_000,
        ..Default::default()
    };
    counters.add_call(&LayerCall {
        layer: LayerId(2),
        ids: &[0, 1, 2, 3],
        lanes: &[],
        times: Some(&times),
    });
    let observations = parse_observations(&counters.to_learn_file().to_json()).unwrap();
    let [first, second] = &observations[..] else {
        panic!("{observations:?}");
    };
    let expert = |expert, hot, cold| ExpertObservation {
        expert: ExpertId(expert),
        raw: 0,
        hot,
        cold,
    };
    let expected = [expert(1, 14, 0), expert(2, 0, 7), expert(3, 2, 5)];
    assert_eq!(first.experts, expected);
    assert_eq!(first.cold_slots_per_call, 3.0);
    assert_eq!(first.wait_per_cold_slot_us, 6.0);
    assert_eq!(second.wait_per_cold_slot_us, 5.0);
}

/// Without a cache, the report is that of a learn run: all selections are cold.
#[test]
fn all_selections_are_cold_without_lanes() {
    let mut counters = Counters::new(PerfMode::Update, 4, 2);
    counters.add_call(&LayerCall {
        layer: LayerId(0),
        ids: &[2, 3],
        lanes: &[],
        times: None,
    });
    assert_eq!(counters.hit_rate(), Some(0.0));
    assert_eq!(counters.selections(LayerId(0), ExpertId(2)), (0, 1));
    let report: Value = serde_json::from_str(&counters.to_learn_file().to_json()).unwrap();
    assert_eq!(report["layers"][0]["hot_experts"], json!([]));
    let layer = &report["layers"][0];
    assert_eq!(layer["cold_experts"], layer["experts"]);
}

/// The sum over requests equals the counters of all of them.
#[test]
fn adds_counters_of_requests() {
    let mut all = example(PerfMode::Full);
    let mut sum = all.clone();
    let mut request = Counters::new(PerfMode::Full, 5, 2);
    for counters in [&mut all, &mut request] {
        counters.start_pass();
        counters.add_call(&LayerCall {
            layer: LayerId(4),
            ids: &[2, 1],
            lanes: &[Cold, Hot1],
            times: Some(&TIMES),
        });
        counters.add_call(&LayerCall {
            layer: LayerId(7),
            ids: &[0],
            lanes: &[],
            times: None,
        });
        counters.add_fallback(LayerId(7));
    }
    sum.add(&request);
    assert_eq!(sum, all);
    sum.add(&Counters::new(PerfMode::Full, 5, 2));
    assert_eq!(sum, all);
}

#[test]
fn new_mode_starts_a_new_window() {
    let mut counters = example(PerfMode::Full);
    counters.set_mode(PerfMode::Update);
    let new = Counters::new(PerfMode::Update, 5, 2);
    assert_eq!(
        counters.to_learn_file().to_json(),
        new.to_learn_file().to_json()
    );
    assert_eq!(counters.hit_rate(), None);
}

#[test]
fn modes_have_the_spellings_of_the_fork() {
    for (mode, names) in [
        (PerfMode::Off, &["off", "0", "false"][..]),
        (PerfMode::Update, &["update"]),
        (PerfMode::Full, &["full", "1", "on", "true"]),
    ] {
        for name in names {
            assert_eq!(name.parse(), Ok(mode));
        }
        assert_eq!(mode.to_string(), names[0]);
    }
    let error = "Full".parse::<PerfMode>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "unknown mode \"Full\"; use off (0, false), update or full (1, on, true)"
    );
}

fn schema() -> jsonschema::Validator {
    let path = moe_testkit::repository("schemas/perf.schema.json");
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    jsonschema::validator_for(&schema).unwrap()
}

fn report(mode: PerfMode) -> Value {
    let mut counters = example(mode);
    counters.add_fallback(LayerId(4));
    serde_json::from_str(&counters.to_learn_file().to_json()).unwrap()
}

#[test]
fn schema_accepts_reports_of_all_modes() {
    for mode in [PerfMode::Off, PerfMode::Update, PerfMode::Full] {
        schema().validate(&report(mode)).unwrap();
        let empty = Counters::new(mode, 5, 2).to_learn_file().to_json();
        let empty: Value = serde_json::from_str(&empty).unwrap();
        schema().validate(&empty).unwrap();
    }
}

#[test]
fn schema_rejects_reports_without_a_key() {
    let schema = schema();
    for mode in [PerfMode::Off, PerfMode::Update, PerfMode::Full] {
        let good = report(mode);
        for pointer in ["", "/summary", "/layers/1"] {
            let Some(object) = good.pointer(pointer).and_then(Value::as_object) else {
                continue;
            };
            for key in object.keys() {
                let mut broken = good.clone();
                let object = broken.pointer_mut(pointer).unwrap().as_object_mut();
                object.unwrap().remove(key);
                let is_optional = key == "parallel_fallback_reasons";
                assert_eq!(schema.is_valid(&broken), is_optional, "{pointer}/{key}");
            }
        }
        let mut other = good.clone();
        other["mode"] = json!("other");
        assert!(!schema.is_valid(&other));
    }
}

/// One thread counts calls, another one reads reports. No report contains a part of a call.
#[test]
fn threads_share_counters() {
    let shared = SharedCounters::new(Counters::new(PerfMode::Update, 4, 2));
    let writer = shared.clone();
    thread::scope(|scope| {
        let counting = scope.spawn(move || {
            for _ in 0..2_000 {
                let mut counters = writer.lock();
                counters.add_call(&LayerCall {
                    layer: LayerId(0),
                    ids: &[1, 2],
                    lanes: &[Hot2, Cold],
                    times: None,
                });
            }
        });
        loop {
            let is_done = counting.is_finished();
            let counters = shared.lock().clone();
            assert_eq!(counters.hot_slots(), counters.cold_slots());
            if is_done {
                assert_eq!(counters.hot_slots(), 2_000);
                break;
            }
        }
    });
}

#[test]
fn panic_of_another_thread_keeps_counters() {
    let shared = SharedCounters::new(example(PerfMode::Update));
    let other = shared.clone();
    let panicked = thread::spawn(move || {
        let _guard = other.lock();
        std::panic::resume_unwind(Box::new(()));
    });
    assert!(panicked.join().is_err());
    assert_eq!(*shared.lock(), example(PerfMode::Update));
}

fn lane(number: u8) -> LaneIndex {
    LaneIndex::hot(number.into()).unwrap_or(Cold)
}

proptest! {
    /// The parsed report has the same totals, hit rate and selections as the counters and the calls.
    #[test]
    fn report_equals_counters(
        calls in proptest::collection::vec(
            (0u16..4, proptest::collection::vec((-1i32..7, 0u8..5), 0..9)),
            0..20,
        ),
    ) {
        let mut counters = Counters::new(PerfMode::Full, 6, 2);
        let (mut hot, mut cold) = (0, 0);
        for (layer, slots) in &calls {
            let (ids, lanes): (Vec<i32>, Vec<LaneIndex>) =
                slots.iter().map(|&(id, number)| (id, lane(number))).unzip();
            for (id, lane) in ids.iter().zip(&lanes) {
                if (0..6).contains(id) {
                    *if lane.is_hot() { &mut hot } else { &mut cold } += 1;
                }
            }
            let (ids, lanes) = (&ids[..], &lanes[..]);
            let times = Some(&TIMES);
            counters.add_call(&LayerCall { layer: LayerId(*layer), ids, lanes, times });
        }
        prop_assert_eq!((counters.hot_slots(), counters.cold_slots()), (hot, cold));

        let text = counters.to_learn_file().to_json();
        let file = LearnFile::parse(&text).unwrap();
        prop_assert_eq!(&file.to_json(), &text);
        let slots: Vec<LayerSlots> = file.layer_slots().unwrap();
        prop_assert_eq!(slots.iter().map(|layer| layer.hot).sum::<u64>(), hot);
        prop_assert_eq!(slots.iter().map(|layer| layer.cold).sum::<u64>(), cold);

        let observations = file.observations().unwrap();
        for layer in &observations {
            for expert in &layer.experts {
                let counted = counters.selections(layer.layer, expert.expert);
                prop_assert_eq!((expert.hot, expert.cold), counted);
            }
        }
        let selections = observations.iter().flat_map(|layer| &layer.experts);
        prop_assert_eq!(selections.map(ExpertObservation::hits).sum::<u64>(), hot + cold);

        // An update computes the same hit rate.
        let ranking = rank(&observations, Weighting::Flat, LayerCurve::DEFAULT);
        let update = Update::new(&Cache::default(), &ranking, &slots, 6, 0.5);
        prop_assert_eq!(update.hit_rate(), counters.hit_rate().unwrap_or(0.0));
        let report: Value = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(&report["summary"]["hot_slot_ratio"], &json!(update.hit_rate()));
    }
}
