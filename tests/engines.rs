//! `--engine`: llama.cpp instead of this program's executor.

mod gpu_options;
#[cfg(feature = "llama-cpp")]
mod with_llama_cpp;

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use crate::support::{arg, args, fail, moe_analyze, repository, run};

const PROMPT: &str = "The kernel driver is responsible for";

/// Arguments that record a few tokens.
fn record(engine: &str, model: &Path, out: &Path) -> Vec<OsString> {
    let always = ["--quiet", "record", "--prompt", PROMPT, "--n-predict", "12", "--ignore-eos"];
    args![always, "--engine", engine, "--model", model, "--out", out]
}

/// A row for each number of the ranges, with the engine and the devices.
#[test]
fn bench_prints_engine_and_accepts_ranges() {
    let model = repository("fixtures/random-gpt-oss-F16.gguf");
    let sizes = ["-p", "2-8*2", "-n", "1-3+2", "-r", "1", "-t", "1-1"];
    let bench = ["--quiet", "bench", "--model", arg(&model), "-o", "csv"];
    let text = run![bench, sizes];
    let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let header = lines.next().unwrap();
    assert!(header.ends_with(&["engine", "gpu_info", "policy", "fallbacks", "hit_rate"]));
    let at = |name| header.iter().position(|&column| column == name).unwrap();
    let tests: Vec<[&str; 4]> = lines
        .map(|row| ["n_threads", "n_prompt", "n_gen", "engine"].map(|name| row[at(name)]))
        .collect();
    let expected = [("2", "0"), ("4", "0"), ("8", "0"), ("0", "1"), ("0", "3")];
    assert_eq!(tests, expected.map(|(p, n)| ["1", p, n, "native"]));
}

#[test]
fn bench_measures_at_a_depth() {
    let model = repository("fixtures/random-gpt-oss-F16.gguf");
    let sizes = ["-p", "0,4", "-n", "2", "-d", "0,6", "-r", "1", "-t", "1", "-o", "json"];
    let text = run!["--quiet", "bench", "--model", arg(&model), sizes];
    let rows: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let column = |name: &str| {
        rows.iter()
            .map(|row| row[name].as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(column("n_depth"), [0, 0, 6, 6]);
    assert_eq!(column("n_prompt"), [4, 0, 4, 0]);
    // The bytes are those of the measured tokens: two tokens that may select the same experts.
    let bytes = column("weight_bytes_per_token");
    assert!(bytes[1].abs_diff(bytes[3]) < bytes[1] / 2, "{bytes:?}");
    let line = fail!["bench", "--model", model, "-d", "4", "--parallel", "2"];
    assert!(line.contains("--n-depth"), "{line}");
}

#[test]
fn bench_rejects_a_command_line_without_tests() {
    let model = repository("fixtures/random-gpt-oss-F16.gguf");
    let line = fail!["bench", "--model", model, "-p", "0", "-n", "0"];
    assert!(line.contains("there is no test to run"), "{line}");
}

/// Options that apply to the run directory are rejected without one.
#[test]
fn rejects_run_options_without_trace() {
    for options in [&["--out", "run"][..], &["--max-trace-mib", "1"], &["--keep-prompt"]] {
        let line = fail!["record", "-n", "1", "--trace", "off", options];
        let expected = format!("{} has no effect with --trace off", options[0]);
        assert!(line.contains(&expected), "{line}");
    }
}

/// llama.cpp runs on the CPU, like the executor without `--device`.
#[test]
fn rejects_gpu_options_with_llama_cpp() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    for options in [&["--device", "cuda"][..], &["--policy", "post-fetch"], &["--cpu-moe"]] {
        let line = fail![record("llama.cpp", &model, &out), options];
        let expected = format!("{} has no effect with --engine llama.cpp", named(options));
        assert!(line.contains(&expected), "{line}");
    }
    assert!(!out.exists());
}

/// How a message names an option: only some policies need a GPU, so it contains the policy.
fn named(options: &[&str]) -> String {
    match options {
        ["--policy", policy] => format!("--policy {policy}"),
        _ => options[0].to_owned(),
    }
}

/// Size of all tensors except experts and embeddings, and of the selected experts of a token in each MoE layer.
/// Every sequence has the tokens of `-p` or `-n`. Weights are read once per pass for all of them.
#[test]
fn bench_evaluates_several_sequences_at_the_same_time() {
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    let bench = ["--quiet", "bench", "--model", arg(&model), "-t", "1", "-r", "1", "-o", "json"];
    let sizes = ["-p", "8", "-n", "4", "-b", "12", "--parallel", "1,3"];
    let rows: serde_json::Value = serde_json::from_str(&run![bench, sizes]).unwrap();
    let column = |name: &str| -> Vec<u64> {
        let values = rows.as_array().unwrap().iter().map(|row| &row[name]);
        values
            .map(|value| value.as_u64().unwrap_or_default())
            .collect()
    };
    assert_eq!(column("n_parallel"), [1, 1, 3, 3]);
    assert_eq!(column("n_prompt"), [8, 0, 8, 0]);
    assert_eq!(column("n_gen"), [0, 4, 0, 4]);
    for row in rows.as_array().unwrap() {
        let tokens = row["n_parallel"].as_u64().unwrap()
            * (row["n_prompt"].as_u64().unwrap() + row["n_gen"].as_u64().unwrap());
        let seconds = row["avg_ns"].as_f64().unwrap() / 1e9;
        let speed = row["avg_ts"].as_f64().unwrap();
        assert!((speed * seconds / tokens as f64 - 1.0).abs() < 0.01, "{row}");
    }
    // Dense weights are read once for three tokens instead of once for each.
    let [_, alone, _, together] = column("weight_bytes_per_token")[..] else {
        panic!("{rows}")
    };
    let (dense, experts) = (124_544, 4 * 4 * 6_144);
    assert_eq!(alone, dense + experts);
    let least = (dense + experts) / 3;
    assert!((least..dense / 3 + experts).contains(&together), "{together}");

    let error = fail!["bench", "--model", arg(&model), "--engine", "llama.cpp", "--parallel", "2"];
    assert!(error.contains("--parallel above 1 needs the executor"), "{error}");
    let cache = ["--policy", "dynamic", "--hot-cache-mib", "1"];
    let rows: serde_json::Value =
        serde_json::from_str(&run![bench, "-p", "0", "-n", "4", "-np", "2", cache]).unwrap();
    assert!(rows[0]["hit_rate"].as_f64().unwrap() > 0.0, "{rows}");
}

#[test]
fn bench_alternates_between_traces() {
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    let tmp = tempfile::tempdir().unwrap();
    let bench = |options: &[&str]| {
        let mut command = moe_analyze();
        command.args(["--quiet", "bench", "--model", arg(&model), "-t", "1", "-o", "json"]);
        command.args(options).env("TMPDIR", tmp.path());
        command.assert()
    };
    let done = bench(&["-p", "4", "-n", "2", "-r", "6", "--trace", "off,experts,all"]).success();
    let rows: serde_json::Value = serde_json::from_slice(&done.get_output().stdout).unwrap();
    let of = |key: &str| -> Vec<serde_json::Value> {
        rows.as_array()
            .unwrap()
            .iter()
            .map(|row| row[key].clone())
            .collect()
    };
    assert_eq!(of("trace"), ["off", "experts", "all", "off", "experts", "all"]);
    assert_eq!(of("n_prompt"), [4, 4, 4, 0, 0, 0]);
    let ratios = of("time_ratio");
    assert_eq!((&ratios[0], &ratios[3]), (&1.0.into(), &1.0.into()));
    for row in rows.as_array().unwrap() {
        let [ratio, low, high] = ["time_ratio", "time_ratio_low", "time_ratio_high"]
            .map(|key| row[key].as_f64().unwrap());
        assert!(0.0 < low && low <= ratio && ratio <= high, "{row}");
    }
    let left = fs::read_dir(tmp.path()).unwrap().count();
    assert_eq!(left, 0, "the trace is removed");
    let one = bench(&["-p", "0", "-n", "1", "-r", "1", "--trace", "all"]).success();
    let rows: serde_json::Value = serde_json::from_slice(&one.get_output().stdout).unwrap();
    assert_eq!(rows[0]["trace"], "all");
    assert!(rows[0].get("time_ratio").is_none(), "there is nothing to compare with");
    let failed = bench(&["--engine", "llama.cpp", "--trace", "all"]).code(2);
    let error = String::from_utf8_lossy(&failed.get_output().stderr).into_owned();
    assert!(error.contains("--trace needs the executor"), "{error}");
    // A file where the temporary directory should be.
    let file = tmp.path().join("file");
    fs::write(&file, "").unwrap();
    let mut command = moe_analyze();
    command.args([
        "--quiet",
        "bench",
        "--model",
        arg(&model),
        "-p",
        "0",
        "-n",
        "1",
        "--trace",
        "all",
    ]);
    let failed = command.env("TMPDIR", &file).assert().code(2);
    let error = String::from_utf8_lossy(&failed.get_output().stderr).into_owned();
    assert!(error.contains("temporary directory") && error.contains("TMPDIR"), "{error}");
    assert!(!error.contains('"'), "{error}");
}

#[test]
fn bench_counts_bytes_per_token() {
    for (arch, expected) in [
        ("dots1", 198_016 + 2 * 4 * 4_608), // one of its 3 layers is dense
        ("gpt-oss", 126_912 + 4 * 4 * 6_528), // the experts have biases
        ("qwen3moe", 124_544 + 4 * 4 * 6_144),
    ] {
        let model = repository(&format!("fixtures/random-{arch}-F16.gguf"));
        let bench = ["--quiet", "bench", "--model", arg(&model), "-o", "json"];
        let sizes = ["-p", "0", "-n", "2", "-r", "1", "-t", "1"];
        let rows = run![bench, sizes];
        let rows: serde_json::Value = serde_json::from_str(&rows).unwrap();
        assert_eq!(rows[0]["weight_bytes_per_token"], expected, "{arch}");
    }
}

#[cfg(not(feature = "llama-cpp"))]
#[test]
fn reports_how_to_build_with_llama_cpp() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let model = repository("fixtures/random-qwen3moe-F16.gguf");
    let line = fail![record("llama.cpp", &model, &out)];
    assert!(line.contains("--features llama-cpp"), "{line}");
    assert!(!out.exists());
    let bench = ["bench", "--engine", "llama.cpp", "--model", arg(&model)];
    assert!(fail![bench].contains("--features llama-cpp"));
    run![record("native", &model, &out)];
    assert!(out.exists());
}

#[cfg(not(feature = "llama-cpp"))]
#[test]
fn with_llama_cpp() {
    moe_testkit::skip(moe_testkit::Need::LlamaCpp, "built without the feature llama-cpp");
}
