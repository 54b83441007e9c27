//! Counts of a run equal its trace, and the simulation of the same cache.

use std::path::Path;

use moe_placement::learn::LearnFile;
use moe_trace::Run;
use moe_trace::record::lane;
use serde_json::Value;

use super::{Workplace, dynamic_cache, routing};
use crate::support::{args, moe_analyze, run};

/// Experts of the records by lane: CPU, hit, miss.
pub fn lanes(trace: &Path) -> [u64; 3] {
    let mut lanes = [0; 3];
    for operation in Run::open(trace).unwrap().routing() {
        for expert in operation.tokens().flat_map(|token| token.experts()) {
            lanes[match expert.lane {
                lane::CPU => 0,
                lane::CACHE_HIT => 1,
                lane::CACHE_MISS => 2,
                other => panic!("lane {other}"),
            }] += 1;
        }
    }
    lanes
}

/// The counts of a run equal those that `simulate` computes from its trace.
pub fn assert_equals_simulation(trace: &Path, mib: &str, policy: &str, predictor: Option<&str>) {
    let what = format!("{mib} MiB, {policy}, {predictor:?}");
    let cache =
        args!["--quiet", "simulate", trace, "--budget-mib", mib, "--policy", policy, "-o", "json"];
    let rows: Value = serde_json::from_str(&run![cache]).unwrap();
    let counts = dynamic_cache(trace).counts.unwrap();
    let number = |key: &str| rows[0][key].as_u64().unwrap();
    assert_eq!(counts.look_ups.iter().sum::<u64>(), number("look_ups"), "{what}");
    assert_eq!(counts.hits.iter().sum::<u64>(), number("hits"), "{what}");
    assert_eq!(counts.evictions, number("evictions"), "{what}");
    let missed_mib = counts.missed_bytes.iter().sum::<u64>() as f64 / f64::from(1 << 20);
    assert!((missed_mib - rows[0]["read_mib"].as_f64().unwrap()).abs() < 0.06, "{what}");

    let Some(predictor) = predictor else {
        assert_eq!(counts.prefetch, None, "{what}");
        return;
    };
    let how = ["--predictor", predictor, "--pcie-gb-s", "10"];
    let rows: Value = serde_json::from_str(&run![cache, how]).unwrap();
    let row = rows.as_array().unwrap().iter();
    let row = row
        .clone()
        .find(|row| row["predictor"] == predictor)
        .unwrap();
    let number = |key: &str| row[key].as_u64().unwrap();
    let prefetch = counts.prefetch.unwrap();
    assert_eq!(counts.hits[1], number("hits"), "{what}");
    assert_eq!(prefetch.missed, number("missed"), "{what}");
    assert_eq!(prefetch.timely + prefetch.late, number("timely") + number("late"), "{what}");
    assert_eq!(prefetch.wasted, number("wasted"), "{what}");
    assert_eq!(prefetch.moved_bytes, number("moved_bytes"), "{what}");
    let precision = 100.0 * prefetch.correct as f64 / prefetch.predicted as f64;
    assert!((precision - row["precision_pct"].as_f64().unwrap()).abs() < 0.001, "{what}");
}

/// For all policies and predictors, with prompts in batches. The generated tokens are those of a run on the CPU.
#[test]
fn counts_equal_simulation_and_tokens_those_of_the_cpu() {
    let work = Workplace::new("F32");
    let expected = routing(&work.record("plain", &["--policy", "cpu"]));
    assert!(expected.len() > 4 * 3 * 12);
    let policies = [
        ("lru", None, "6"),
        ("lfu", Some("previous"), "9"),
        ("lfuda", Some("hottest"), "4"),
        ("lfru", Some("markov"), "7"),
        ("slru", Some("coactivation"), "12"),
        ("s3fifo", None, "5"),
        ("arc", Some("markov"), "10"),
        ("clock", Some("previous"), "3"),
        ("random", Some("hottest"), "8"),
        ("layer", Some("markov"), "13"),
        ("layerlfu", None, "16"),
        ("layerarc", Some("coactivation"), "3"),
        ("lru", Some("markov"), "100"),
    ];
    for (policy, predictor, mib) in policies {
        let mut options =
            args!["--policy", "dynamic", "--cache-policy", policy, "--hot-cache-mib", mib];
        if let Some(predictor) = predictor {
            options.extend(args!["--predictor", predictor]);
        }
        options.push("--force".into());
        let options: Vec<&str> = options.iter().map(|o| o.to_str().unwrap()).collect();
        let run = work.record("run", &options);
        assert!(routing(&run) == expected, "{policy}");
        assert_equals_simulation(&run, mib, policy, predictor);
        let cache = dynamic_cache(&run);
        let failures = cache.failures.unwrap();
        assert_eq!((failures.calls, failures.copies, failures.first_error), (0, 0, None));

        // perf.json counts what the slots computed.
        let [cpu, hit, miss] = lanes(&run);
        let perf = std::fs::read_to_string(run.join("perf.json")).unwrap();
        let slots = LearnFile::parse(&perf).unwrap().layer_slots().unwrap();
        let in_slots: u64 = slots.iter().map(|layer| layer.hot).sum();
        let on_cpu: u64 = slots.iter().map(|layer| layer.cold).sum();
        assert_eq!((in_slots, on_cpu), (hit + miss, cpu), "{policy}");
        assert!(hit > 0, "{policy}");
    }
}

/// The policy of a simulation holds the experts of the last batch, but a cache without slots has none.
#[test]
fn nothing_is_cached_without_slots() {
    let work = Workplace::new("F32");
    let out = work.path("run");
    let inputs = args!["record", "--model", work.model, "-p", "Das", "-n", "2", "--out", out];
    let cache = ["--policy", "dynamic", "--hot-cache-mib", "0"];
    let done = moe_analyze().args(args![inputs, cache]).assert().success();
    let notes = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(notes.contains("dynamic cache: no slots on CPU, so no expert is cached\n"), "{notes}");
    assert!(notes.contains(" lookups hit; 0 experts evicted"), "{notes}");
    let counts = dynamic_cache(&out).counts.unwrap();
    let look_ups: u64 = counts.look_ups.iter().sum();
    assert!(look_ups > 0);
    assert_eq!((counts.hits, counts.evictions, counts.without_slot), ([0, 0], 0, look_ups));
    let [cpu, hit, miss] = lanes(&out);
    assert!(cpu > 0);
    assert_eq!((hit, miss), (0, 0));
}

/// In passes of single tokens, lanes of records, lookups and simulation agree.
#[test]
fn records_have_hits_and_misses() {
    let work = Workplace::new("F32");
    let run = work.record("run", &["-b", "1", "--policy", "dynamic", "--hot-cache-mib", "8"]);
    assert_equals_simulation(&run, "8", "lru", None);
    let counts = dynamic_cache(&run).counts.unwrap();
    let hits: u64 = counts.hits.iter().sum();
    let look_ups: u64 = counts.look_ups.iter().sum();
    assert_eq!(counts.without_slot, 0);
    assert_eq!(lanes(&run), [0, hits, look_ups - hits]);
    let info = run!["info", run];
    let hit_rate = format!("{:.1} % of lookups", 100.0 * hits as f64 / look_ups as f64);
    assert!(info.contains(&hit_rate), "{info}");
}

/// Layers with experts of several sizes have slots of several sizes. Counts are those of the policy also where an expert has no
/// slot.
#[test]
fn counts_equal_simulation_with_experts_of_several_sizes() {
    let work = Workplace::new("Q4_K_M");
    for (policy, mib) in [("lfu", "1"), ("layer", "2"), ("lru", "3")] {
        let cache = ["--policy", "dynamic", "--cache-policy", policy, "--hot-cache-mib", mib];
        let run = work.record(policy, &cache);
        assert_equals_simulation(&run, mib, policy, None);
    }
}

/// A replay has the counts of the run whose trace it replays, in each of its runs.
#[test]
fn replay_counts_the_same_as_its_trace() {
    let work = Workplace::new("F32");
    let cache = [
        "--policy", "dynamic", "--cache-policy", "lfu", "--hot-cache-mib", "6", "--predictor",
        "markov", "--prefetch-depth", "2", "--prefetch-experts", "3",
    ];
    let recorded = work.record("recorded", &cache);
    let out = work.path("replayed");
    let how = ["-r", "2", "-t", "1", "-o", "json"];
    let rows = run!["--quiet", "replay", recorded, "--model", work.model, how, cache, "--out", out];
    let (before, after) = (dynamic_cache(&recorded), dynamic_cache(&out));
    assert_eq!(before, after);
    assert_eq!((before.depth, before.n_predict), (2, Some(3)));
    assert_eq!(lanes(&out), lanes(&recorded));
    let rows: Value = serde_json::from_str(&rows).unwrap();
    let layers = rows.as_array().unwrap().iter();
    let layers = layers.filter(|row| !row["layer_id"].is_null());
    let hits: u64 = layers.map(|row| row["cache_hit"].as_u64().unwrap()).sum();
    assert_eq!(hits, lanes(&recorded)[1]);
}

#[test]
fn bench_prints_the_hit_rate() {
    let work = Workplace::new("F32");
    let tests = ["-p", "8", "-n", "4", "-r", "1", "-t", "1", "-o", "json"];
    let cache = ["--policy", "dynamic", "--hot-cache-mib", "12"];
    let rows = run!["--quiet", "bench", "--model", work.model, tests, cache];
    let rows: Value = serde_json::from_str(&rows).unwrap();
    for row in rows.as_array().unwrap() {
        assert_eq!(row["policy"], "dynamic");
        let rate = row["hit_rate"].as_f64().unwrap();
        assert!(rate > 0.0 && rate < 1.0, "{row}");
    }
}
