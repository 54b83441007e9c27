//! Several inputs, which must be of one model and different runs, and tables.

use std::fs;

use serde_json::Value;

use super::Fixture;
use crate::support::{arg, args, fail, known_run, moe_analyze, repository, run};

#[test]
fn adds_several_runs() {
    let fixture = Fixture::new();
    let (tables, other) = (fixture.path("tables"), fixture.path("other"));
    known_run(&other);
    let both = run!["hotness", tables, other];
    let counted = both.lines().nth(1).unwrap();
    assert!(counted.starts_with("32 prompt and generated tokens"), "{both}");

    // A trace without a manifest does not contain its model, which is a warning.
    let trace = other.join("trace.bin");
    let assert = moe_analyze()
        .args(args!["hotness", tables, trace])
        .assert()
        .success();
    let stderr = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    assert!(stderr.starts_with("warning: the model of 1 input is unknown"), "{stderr}");
}

/// Adds a run to a dataset next to the fixture.
fn add_to_dataset(fixture: &Fixture, run: &str) {
    let (run, dataset) = (fixture.path(run), fixture.path("dataset"));
    run!["--quiet", "parquet", run, "--dataset", dataset];
}

#[test]
fn rejects_the_same_run_twice() {
    let fixture = Fixture::new();
    add_to_dataset(&fixture, "run");
    fs::copy(fixture.path("run/trace.bin"), fixture.path("copy.bin")).unwrap();
    for pair in [
        ["run", "run"],
        ["run", "tables"],
        ["dataset", "tables/routing.parquet"],
        ["run/trace.bin", "copy.bin"],
    ] {
        let [left, right] = pair.map(|name| fixture.path(name));
        let line = fail!["hotness", left, right];
        assert!(
            line.contains("was already counted") && line.contains(arg(&right)),
            "{pair:?}: {line}"
        );
    }
    // One run under two names in a dataset is an error; several parts of one directory are one run.
    let runs = fixture.path("dataset/routing");
    let run = fs::read_dir(&runs).unwrap().next().unwrap().unwrap().path();
    let part = fs::read_dir(&run).unwrap().next().unwrap().unwrap().path();
    fs::copy(&part, run.join("part-2.parquet")).unwrap();
    let parts = run!["hotness", fixture.path("dataset")];
    assert!(parts.contains("\n32 prompt"), "{parts}");
    fs::create_dir(runs.join("run=other")).unwrap();
    fs::copy(&part, runs.join("run=other/part-0.parquet")).unwrap();
    assert!(fail!["hotness", fixture.path("dataset")].contains("already counted"));
}

#[test]
fn rejects_runs_of_different_models() {
    let fixture = Fixture::new();
    let other = fixture.path("other");
    known_run(&other);
    let manifest = fs::read_to_string(other.join("manifest.json")).unwrap();
    let mut manifest: Value = serde_json::from_str(&manifest).unwrap();
    manifest["model"]["header_xxh3"] = "0123456789abcdef".into();
    manifest["model"]["path"] = "other.gguf".into();
    fs::write(other.join("manifest.json"), manifest.to_string()).unwrap();
    // The map is that of the known model.
    fs::remove_file(other.join("gguf-map.parquet")).unwrap();
    add_to_dataset(&fixture, "run");
    add_to_dataset(&fixture, "other");
    let (run, dataset) = (fixture.path("run"), fixture.path("dataset"));
    for args in [&["hotness", arg(&run), arg(&other)][..], &["hotness", arg(&dataset)]] {
        let line = fail![args];
        for part in [
            "of different models",
            "\"tiny-qwen3moe-Q4_K_M.gguf\"",
            "\"other.gguf\" (header hash 0123456789abcdef)",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
    }
    // `plan` also rejects both, and one run twice.
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let budget = ["--model", arg(&model), "--budget-mib", "1"];
    for (again, expected) in [(&other, "of different models"), (&run, "already counted")] {
        let line = fail!["plan", run, again, budget];
        assert!(line.contains(expected) && line.contains(arg(again)), "{line}");
    }
}

#[test]
fn rejects_other_tables() {
    let fixture = Fixture::new();
    for table in ["ops", "accesses"] {
        let table = fixture.path(&format!("tables/{table}.parquet"));
        let line = fail!["hotness", table];
        assert!(line.contains("is not a table of routing") && line.contains(arg(&table)), "{line}");
    }
    let map = fixture.path("run/gguf-map.parquet");
    assert!(fail!["hotness", map].contains("not a table of routing"));
}
