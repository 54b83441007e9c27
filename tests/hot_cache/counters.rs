//! Counters of a run equal its trace, and the simulation of the same cache.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{Workplace, hot_cache, model, report, slots_of_report, slots_of_trace, sum};
use crate::support::{arg, fail, run};

fn hits_of_simulation(trace: &Path, learn: &Path, rate: &str) -> (u64, u64) {
    let cache = ["--budget-mib", "1", "--policy", "hotcache", "--update-rate", rate];
    let rows = run!["--quiet", "simulate", trace, "--learn", learn, cache, "-o", "json"];
    let rows: Value = serde_json::from_str(&rows).unwrap();
    let number = |key: &str| rows[0][key].as_u64().unwrap();
    (number("hits"), number("look_ups"))
}

/// Hit rates of trace, perf.json, manifest and simulation. Batches of one token, because the simulation looks an expert up once
/// for each batch.
#[test]
fn counters_equal_trace_and_simulation() {
    let work = Workplace::new();
    for rate in ["0", "0.1", "1"] {
        let cache = ["--hot-cache", arg(&work.learn), "--hot-cache-mib", "1", "-b", "1"];
        let run = work.record(rate, &[&cache[..], &["--update-rate", rate]].concat());
        let counted = slots_of_report(&run);
        assert_eq!(counted, slots_of_trace(&run));
        let (hot, cold) = sum(&counted);
        assert!(hot > 0 && cold > 0, "{hot} hot and {cold} cold");
        assert_eq!(hits_of_simulation(&run, &work.learn, rate), (hot, hot + cold), "rate {rate}");

        let requests = hot_cache(&run).requests;
        assert_eq!(requests.len(), 3);
        assert_eq!(requests.iter().map(|r| r.hot_slots).sum::<u64>(), hot);
        assert_eq!(requests.iter().map(|r| r.cold_slots).sum::<u64>(), cold);
        let exchanged = requests.iter().map(|r| r.exchanged > 0);
        let expected = rate != "0";
        assert_eq!(exchanged.collect::<Vec<_>>(), [expected, expected, false]);
    }
}

/// Batches of several tokens, and three lanes.
#[test]
fn counters_equal_trace_with_batches_and_lanes() {
    let work = Workplace::new();
    for strategy in ["warm", "hot-even", "even-split"] {
        let cache = ["--hot-cache", arg(&work.learn), "--hot-cache-mib", "1,1,1"];
        let options = [&cache[..], &["--hot-cache-strategy", strategy, "--perf", "full"]].concat();
        let run = work.record(strategy, &options);
        let counted = slots_of_report(&run);
        assert_eq!(counted, slots_of_trace(&run), "{strategy}");
        assert!(sum(&counted).0 > 0);

        let report: Value = serde_json::from_str(&report(&run).to_json()).unwrap();
        let lanes = [0, 1, 2].map(|n| &report["summary"][format!("hot{n}_slots_total")]);
        let lanes = lanes.map(|slots| slots.as_u64().unwrap());
        assert_eq!(lanes.iter().sum::<u64>(), sum(&counted).0);
        assert!(
            report["summary"]["total_moe_time_per_call_us"]
                .as_f64()
                .unwrap()
                > 0.0
        );
        let planned = hot_cache(&run).lanes;
        assert_eq!(planned.len(), 3);
        for (lane, slots) in planned.iter().zip(lanes) {
            assert_eq!(lane.device, "CPU");
            assert_eq!(lane.bytes, lane.planned_bytes, "{strategy}");
            assert_eq!(slots > 0, !lane.experts.is_empty(), "{strategy}");
        }
    }
}

/// The report is a learn file: `hotness` and `plan` count the same activations as in the trace.
#[test]
fn other_commands_read_the_report() {
    let work = Workplace::new();
    let plan = work.path("plan.json");
    let budget = ["--budget-mib", "1", "-o", "json"];
    fs::write(&plan, run!["--quiet", "plan", work.learn, "--model", model(), budget]).unwrap();
    let run = work.record("run", &["--hot-cache", arg(&plan)]);
    let perf = run.join("perf.json");
    let rows = |path: &Path| run!["--quiet", "hotness", path, "-o", "csv"];
    let layers = |rows: String| {
        let fields = rows
            .lines()
            .map(|line| line.split(',').take(2).collect::<Vec<_>>().join(","));
        fields.collect::<Vec<_>>()
    };
    assert_eq!(layers(rows(&perf)), layers(rows(&run)));
    let update = run!["plan", perf, "--update", plan, "-o", "json"];
    let update: Value = serde_json::from_str(&update).unwrap();
    let (hot, cold) = sum(&slots_of_report(&run));
    assert_eq!(update["hot_slots"], hot);
    assert_eq!(update["cold_slots"], cold);

    let info = run!["info", run];
    let hit_rate = 100.0 * hot as f64 / (hot + cold) as f64;
    assert!(info.contains(&format!("{hit_rate:.1} % (counters in perf.json)")), "{info}");
    assert_eq!(hot_cache(&run).kind, "plan");
    assert_eq!(hot_cache(&run).source, arg(&plan));

    // The report of a replaced run does not stay.
    run!["--quiet", "record", "--model", model(), "-n", "2", "--force", "--out", run];
    assert!(!perf.exists());
}

#[test]
fn nothing_is_counted_with_perf_off() {
    let work = Workplace::new();
    let cache = ["--hot-cache", arg(&work.learn), "--hot-cache-mib", "1", "--perf", "off"];
    let run = work.record("run", &cache);
    let text = fs::read_to_string(run.join("perf.json")).unwrap();
    assert!(text.starts_with(r#"{"enabled":false,"mode":"off","#), "{text}");
    assert!(sum(&slots_of_trace(&run)).0 > 0, "records have lanes");
    assert!(hot_cache(&run).requests.is_empty());
}

#[test]
fn replay_counts_the_same_slots_as_its_trace() {
    let work = Workplace::new();
    let cache = ["--hot-cache", arg(&work.learn), "--hot-cache-mib", "1"];
    let recorded = work.record("recorded", &cache);
    let out = work.path("replayed");
    let how = ["--policy", "hot-cache", "-r", "1", "-t", "1", "-o", "json"];
    let rows = run!["--quiet", "replay", recorded, "--model", model(), how, cache, "--out", out];
    assert_eq!(slots_of_report(&out), slots_of_report(&recorded));
    assert_eq!(slots_of_trace(&out), slots_of_report(&recorded));
    assert_eq!(hot_cache(&out).requests, hot_cache(&recorded).requests);
    let rows: Value = serde_json::from_str(&rows).unwrap();
    let hot = rows
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| !row["layer_id"].is_null());
    let hot: u64 = hot.map(|row| row["hot_cache"].as_u64().unwrap()).sum();
    assert_eq!(hot, sum(&slots_of_report(&out)).0);
}

#[test]
fn bench_prints_the_hit_rate() {
    let work = Workplace::new();
    let tests = ["-p", "8", "-n", "4", "-r", "1", "-t", "1", "-o", "json"];
    let cache = ["--policy", "hot-cache", "--hot-cache", arg(&work.learn), "--hot-cache-mib", "1"];
    let rows = run!["--quiet", "bench", "--model", model(), tests, cache];
    let rows: Value = serde_json::from_str(&rows).unwrap();
    for row in rows.as_array().unwrap() {
        assert_eq!(row["policy"], "hot-cache");
        let rate = row["hit_rate"].as_f64().unwrap();
        assert!(rate > 0.0 && rate < 1.0, "{row}");
    }
    let rows = run!["--quiet", "bench", "--model", model(), tests];
    let rows: Value = serde_json::from_str(&rows).unwrap();
    assert!(rows[0]["hit_rate"].is_null());
}

/// Each value of --perf has a row, with the ratio of its times to those of the first one.
#[test]
fn bench_alternates_between_perf_modes() {
    let work = Workplace::new();
    let tests = ["-p", "0", "-n", "4", "-r", "6", "-t", "1", "-o", "json"];
    let cache = ["--policy", "hot-cache", "--hot-cache", arg(&work.learn), "--hot-cache-mib", "1"];
    let rows =
        run!["--quiet", "bench", "--model", model(), tests, cache, "--perf", "off,update,full"];
    let rows: Value = serde_json::from_str(&rows).unwrap();
    let modes: Vec<&str> = rows
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["perf"].as_str().unwrap())
        .collect();
    assert_eq!(modes, ["off", "update", "full"]);
    for key in ["time_ratio", "time_ratio_low", "time_ratio_high"] {
        assert_eq!(rows[0][key], 1.0);
    }
    for row in rows.as_array().unwrap() {
        let [ratio, low, high] = ["time_ratio", "time_ratio_low", "time_ratio_high"]
            .map(|key| row[key].as_f64().unwrap());
        assert!(0.0 < low && low <= ratio && ratio <= high, "{row}");
    }
    // Fewer rounds have no interval, and one value has no ratio.
    let few = ["-p", "0", "-n", "1", "-r", "1", "-t", "1", "-o", "json"];
    let rows = run!["--quiet", "bench", "--model", model(), few, cache, "--perf", "update,full"];
    let rows: Value = serde_json::from_str(&rows).unwrap();
    assert!(rows[1]["time_ratio"].is_number() && rows[1]["time_ratio_low"].is_null());
    let rows = run!["--quiet", "bench", "--model", model(), few, cache, "--perf", "full"];
    let rows: Value = serde_json::from_str(&rows).unwrap();
    assert!(rows[0].get("perf").is_none() && rows[0].get("time_ratio").is_none());
    let error = fail![
        "record",
        "--model",
        model(),
        "--prompt",
        "a",
        "-n",
        "1",
        cache,
        "--perf",
        "off,full"
    ];
    assert!(error.contains("--perf") && error.contains("pass one"), "{error}");
}

/// A cache of 0 % computes no expert, one of 100 % all of those that the learn file contains and that fill free memory.
#[test]
fn bench_runs_caches_of_several_sizes() {
    let work = Workplace::new();
    let tests = ["-p", "0", "-n", "4", "-r", "1", "-t", "1", "-o", "json"];
    let cache =
        ["--policy", "hot-cache", "--hot-cache", arg(&work.learn), "--hot-cache-fill-random", "1"];
    let sizes = ["--hot-cache-percent", "0,50,100"];
    let rows = run!["--quiet", "bench", "--model", model(), tests, cache, sizes];
    let rows: Value = serde_json::from_str(&rows).unwrap();
    let of = |key: &str| -> Vec<f64> {
        let rows = rows.as_array().unwrap().iter();
        rows.map(|row| row[key].as_f64().unwrap()).collect()
    };
    assert_eq!(of("hot_cache_percent"), [0.0, 50.0, 100.0]);
    let rates = of("hit_rate");
    assert_eq!((rates[0], rates[2]), (0.0, 1.0));
    assert!(rates[1] > 0.0 && rates[1] < 1.0, "{rates:?}");
    let error = fail!["bench", "--model", model(), tests, cache, sizes, "--hot-cache-mib", "1"];
    assert!(error.contains("--hot-cache-mib"), "{error}");
    let error = fail!["bench", "--model", model(), tests, sizes];
    assert!(error.contains("--policy hot-cache"), "{error}");
    let plan = work.path("plan.json");
    let budget = ["--budget-mib", "1", "-o", "json"];
    fs::write(&plan, run!["--quiet", "plan", work.learn, "--model", model(), budget]).unwrap();
    let planned = ["--policy", "hot-cache", "--hot-cache", arg(&plan)];
    let error = fail!["bench", "--model", model(), tests, planned, sizes];
    assert!(error.contains("--hot-cache-percent has no effect with a plan"), "{error}");
    let error = fail!["bench", "--model", model(), tests, cache, "--hot-cache-percent", "101"];
    assert!(error.contains("a number from 0 to 100"), "{error}");
}
