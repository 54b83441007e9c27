//! Outputs to existing directories: files that are replaced, removed and kept.

use std::fs;
use std::path::Path;

use crate::support::{arg, failure_of, file_of, known_run, moe_analyze, repository, stdout_of};

const TRACE: &str = "{\"t\":0,\"layer\":1,\"experts\":[5,1]}\n";

/// Runs the program, expects success, and returns stderr.
fn stderr_of(args: &[&str]) -> String {
    let assert = moe_analyze().args(args).assert().success();
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn convert_removes_only_files_in_its_own_format() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    for (format, name) in [("thesis-json", "token-99999.json"), ("mesh-llm", "layer-999.csv")] {
        let out = dir.path().join(format);
        let convert = ["convert", arg(&run), "--to", format, "--out", arg(&out)];
        let forced = [&convert[..], &["--force"]].concat();
        stdout_of(convert);
        let files = names(&out);
        fs::write(out.join(name), "precious").unwrap();
        let error = failure_of([&["--quiet"], &forced[..]].concat());
        assert!(error.contains(name), "{error}");
        assert_eq!(fs::read_to_string(out.join(name)).unwrap(), "precious");

        fs::copy(out.join(&files[0]), out.join(name)).unwrap();
        let stderr = stderr_of(&forced);
        assert!(stderr.contains("removed 1 file of an earlier trace"), "{stderr}");
        assert_eq!(names(&out), files);
    }
}

#[test]
fn convert_replaces_only_files_in_its_own_format() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    for format in [
        "bigmoeonedge", "coli-usage", "ds4-hotlist", "eplb", "eplb-csv", "jsonl", "learn", "npy",
        "npy-counts", "perfetto", "sglang",
    ] {
        let out = dir.path().join(format);
        let forced =
            ["--quiet", "convert", arg(&run), "--to", format, "--out", arg(&out), "--force"];
        for other in ["precious", "{\"name\": \"package\"}"] {
            fs::write(&out, other).unwrap();
            let error = failure_of(forced);
            assert!(error.contains(&format!("has another format than {format}")), "{error}");
            assert_eq!(fs::read_to_string(&out).unwrap(), other);
        }
        fs::write(&out, "").unwrap();
        stdout_of(forced);
        let written = fs::read(&out).unwrap();
        assert!(!written.is_empty(), "{format}");
        stdout_of(forced);
        assert_eq!(fs::read(&out).unwrap(), written, "{format}");
    }
}

#[test]
fn protects_run_directory_only_for_files_of_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let trace = file_of(&run, "t.jsonl", TRACE);
    let out = run.join("learn.json");
    let to_learn = ["--to", "learn", "--out", arg(&out)];
    for own in ["", "trace.bin"] {
        let input = run.join(own);
        let error = failure_of([&["--quiet", "convert", arg(&input)], &to_learn[..]].concat());
        assert!(error.contains("input"), "{error}");
        assert!(!out.exists());
    }
    stdout_of([&["--quiet", "convert", arg(&trace)], &to_learn[..]].concat());
    assert!(out.is_file());
}

#[test]
fn parquet_removes_tables_and_map_of_an_earlier_trace() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let trace = file_of(dir.path(), "t.jsonl", TRACE);
    let out = dir.path().join("tables");
    let parquet = |input: &Path| {
        stdout_of(["--quiet", "parquet", arg(input), "--out", arg(&out), "--force"]);
        names(&out)
    };
    let tables = ["accesses.parquet", "ops.parquet", "routing.parquet"];
    let map = "gguf-map.parquet";
    assert_eq!(parquet(&run), tables);
    fs::copy(run.join(map), out.join(map)).unwrap();
    // The map of the same model stays.
    assert_eq!(parquet(&run), ["accesses.parquet", map, "ops.parquet", "routing.parquet"]);
    assert_eq!(parquet(&trace), ["routing.parquet"]);
    fs::write(out.join(map), "of another program").unwrap();
    assert_eq!(parquet(&trace), [map, "routing.parquet"]);
}

#[test]
fn info_requires_only_routing_of_foreign_traces() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    known_run(&run);
    let trace = file_of(dir.path(), "t.jsonl", TRACE);
    let tables = dir.path().join("tables");
    let dataset = dir.path().join("dataset");
    let outputs = ["--out", arg(&tables), "--dataset", arg(&dataset)];
    stdout_of([&["--quiet", "parquet", arg(&trace)], &outputs[..]].concat());
    for out in [&tables, &dataset] {
        moe_analyze().args(["info", arg(out)]).assert().success();
    }
    let of_run = dir.path().join("of_run");
    stdout_of(["--quiet", "parquet", arg(&run), "--out", arg(&of_run)]);
    fs::remove_file(of_run.join("ops.parquet")).unwrap();
    moe_analyze().args(["info", arg(&of_run)]).assert().code(1);
}

#[cfg(target_os = "linux")]
#[test]
fn replay_prints_measurements_if_recording_fails() {
    let dir = tempfile::tempdir().unwrap();
    let trace = file_of(dir.path(), "t.jsonl", TRACE);
    let model = repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf");
    let replay = ["--quiet", "replay", arg(&trace), "--model", arg(&model)];
    let options = ["--device", "cpu", "-r", "1", "-o", "csv"];
    // A file system in which no directory can be created.
    let out = ["--out", "/proc/run"];
    let output = moe_analyze()
        .args([&replay[..], &options[..], &out[..]].concat())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(stdout.lines().count() > 1, "{stdout}");
    assert!(stderr.contains("/proc/run"), "{stderr}");
}
