//! Layers that are launched before the CPU knows their routing decisions, with a replacement for the driver of a GPU.

use std::fs;
use std::path::{Path, PathBuf};

use super::counts::{assert_equals_simulation, lanes};
use super::{Workplace, dynamic_cache};
use crate::support::args;
use crate::support::gpu::{stand_in, with_gpu};

/// Records two prompts on a GPU whose routers select changing experts.
fn record(work: &Workplace, driver: &Path, name: &str, fails: &str, options: &[&str]) -> PathBuf {
    let out = work.path(name);
    let inputs = args!["--model", work.model, "--prompts", work.prompts, "-n", "12", "-t", "1"];
    let cache = ["--device", "cuda", "--policy", "dynamic", "--ignore-eos"];
    let record = args!["--quiet", "record", inputs, cache, options, "--out", out];
    let mut command = with_gpu(driver, fails, &record);
    command.env("STAND_IN_EXPERTS", "8").assert().success();
    out
}

/// Policy, lookups and records are those of a run that waits for each layer (`--perf full`).
#[test]
fn counts_equal_simulation_and_those_of_a_run_that_waits() {
    let Some(driver) = stand_in() else { return };
    let work = Workplace::new("F32");
    for (policy, mib) in [("lru", "9"), ("lfu", "7"), ("layerarc", "12"), ("random", "100")] {
        let options = ["--cache-policy", policy, "--hot-cache-mib", mib];
        let ahead = record(&work, driver.path(), &format!("{policy}-ahead"), "", &options);
        assert_equals_simulation(&ahead, mib, policy, None);
        let waits = [&options[..], &["--perf", "full"]].concat();
        let waits = record(&work, driver.path(), &format!("{policy}-waits"), "", &waits);
        let (cache, expected) = (dynamic_cache(&ahead), dynamic_cache(&waits));
        assert_eq!(cache.device, "CUDA0");
        assert_eq!(cache.counts, expected.counts, "{policy}");
        assert_eq!(cache.failures.unwrap().first_error, None, "{policy}");
        let [cpu, hit, miss] = lanes(&ahead);
        assert_eq!([cpu, hit, miss], lanes(&waits), "{policy}");
        assert!(hit > 0 && miss > 0, "{policy}");
    }
}

/// A pass whose layers cannot be launched ahead runs again, and later passes wait for each layer.
#[test]
fn failed_pass_runs_again() {
    let Some(driver) = stand_in() else { return };
    let work = Workplace::new("F32");
    let run = record(&work, driver.path(), "run", "wait", &["--hot-cache-mib", "9"]);
    let cache = dynamic_cache(&run);
    let failures = cache.failures.unwrap();
    assert_eq!((failures.calls, failures.copies), (1, 0));
    assert!(
        failures
            .first_error
            .unwrap()
            .contains("a wait for slots failed")
    );
    let counts = cache.counts.unwrap();
    assert!(counts.look_ups[1] > 0);
    assert_equals_simulation(&run, "9", "lru", None);
    let [cpu, hit, miss] = lanes(&run);
    assert!(hit > 0 && miss > 0, "{cpu}, {hit}, {miss}");
}

/// Layers before the failed one have looked their experts up when the pass runs again.
#[test]
fn lookups_of_a_pass_that_runs_again_are_counted_once() {
    let Some(driver) = stand_in() else { return };
    let work = Workplace::new("F32");
    let options = ["--hot-cache-mib", "9"];
    let run = record(&work, driver.path(), "run", "search", &options);
    let cache = dynamic_cache(&run);
    let failures = cache.failures.unwrap();
    assert_eq!(failures.calls, 1);
    assert!(failures.copies > 0);
    let counts = cache.counts.unwrap();
    let complete = record(&work, driver.path(), "complete", "", &options);
    let expected = dynamic_cache(&complete).counts.unwrap();
    assert_eq!(counts.look_ups, expected.look_ups);
    let n_experts = |run: &Path| lanes(run).iter().sum::<u64>();
    assert_eq!(n_experts(&run), n_experts(&complete));
    let updates = |run: &Path| {
        let report = fs::read_to_string(run.join("perf.json")).unwrap();
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        report["updates"].as_u64().unwrap()
    };
    assert_eq!(updates(&run), updates(&complete));
}
