//! `--engine`: llama.cpp instead of this program's executor.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use moe_testkit::{Need, skip};

use crate::support::{Arg, arg, args, fail, moe_analyze, repository, run};

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
    skip(Need::LlamaCpp, "built without the feature llama-cpp");
}

#[cfg(feature = "llama-cpp")]
mod with_llama_cpp {
    use moe_trace::Run;
    use serde_json::Value;

    use super::*;
    use crate::support::write_gguf;

    fn json(args: impl Arg) -> Value {
        serde_json::from_str(&run![args]).unwrap()
    }

    /// An F16 model yields the same text and the same routing in both engines.
    #[test]
    fn engines_record_equal_routing() {
        let dir = tempfile::tempdir().unwrap();
        let model = repository("fixtures/random-gpt-oss-F16.gguf");
        let runs = ["native", "llama.cpp"].map(|engine| dir.path().join(engine));
        let texts =
            [run![record("native", &model, &runs[0])], run![record("llama.cpp", &model, &runs[1])]];
        assert_eq!(texts[0], texts[1]);
        let counts = runs.each_ref().map(|run| {
            run!["info", run];
            let rows = json(args!["hotness", run, "-o", "json"]);
            let count = |row: &Value| {
                ["layer_id", "expert_id", "count"].map(|key| row[key].as_u64().unwrap())
            };
            rows.as_array()
                .unwrap()
                .iter()
                .map(count)
                .collect::<Vec<_>>()
        });
        assert_eq!(counts[0], counts[1]);

        let run = Run::open(&runs[1]).unwrap();
        let manifest = run.manifest.as_ref().unwrap();
        assert_eq!(manifest.engine.name, "llama.cpp");
        assert!(manifest.engine.version.starts_with("llama-cpp-sys-2 "));
        assert_eq!(manifest.records, Some(run.trace.records().len() as u64));
        assert_eq!((manifest.model.n_layer, manifest.model.n_expert), (4, 16));
        assert_eq!(manifest.tokens.generated, 12);
        assert!(manifest.prompts.is_none() && !manifest.command.contains(&PROMPT.to_owned()));
        // names that are missing in the usual table follow its last name
        assert_eq!(run.ops().number("MUL_MAT_ID"), Some(30));
        assert!(run.ops().iter().count() > 95);

        let tables = dir.path().join("tables");
        run!["parquet", runs[1], "--out", tables];
        run!["info", tables];
    }

    /// Engines do not compute the blocks of an MTP head, but manifests count them.
    #[test]
    fn engines_count_the_blocks_of_an_mtp_head() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model.gguf");
        let like = repository("fixtures/random-qwen3moe-F16.gguf");
        let like = moe_gguf::Gguf::open(like).unwrap();
        let keys = [
            ("qwen3moe.block_count", moe_gguf::Value::U32(5)),
            ("qwen3moe.nextn_predict_layers", moe_gguf::Value::U32(1)),
        ];
        write_gguf(&model, Some(&like), &keys, &[]);
        for engine in ["native", "llama.cpp"] {
            let run = dir.path().join(engine);
            run![record(engine, &model, &run)];
            let manifest = Run::open(&run).unwrap().manifest.unwrap().model;
            let counts = (manifest.n_layer, manifest.n_nextn_layer);
            assert_eq!(counts, (5, 1), "{engine}");
            let counts = dir.path().join(format!("{engine}.json"));
            let eplb = ["convert", arg(&run), "--to", "eplb", "--out", arg(&counts)];
            run![eplb];
            let counts: Value = serde_json::from_slice(&fs::read(counts).unwrap()).unwrap();
            assert_eq!(counts.as_array().unwrap().len(), 4, "{engine}");
        }
    }

    #[test]
    fn both_engines_record_linear_attention() {
        let dir = tempfile::tempdir().unwrap();
        let [spec, model] = ["spec.json", "model.gguf"].map(|name| dir.path().join(name));
        let description = r#"{"arch": "qwen3next", "n_layer": 4, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64,
            "n_expert": 16, "n_expert_used": 4, "n_ff_exp": 256, "rope_dims": 32, "quant": "Q8_0",
            "linear_attention": {"conv_kernel": 4, "state_size": 64, "group_count": 2, "time_step_rank": 4,
            "full_attention_interval": 4}, "vocab": {"n_tokens": 600, "pre": "qwen2", "n_merges": 200}}"#;
        fs::write(&spec, description).unwrap();
        run!["--quiet", "synth", "--spec", spec, "--out", model];
        for engine in ["native", "llama.cpp"] {
            let run = dir.path().join(engine);
            run![record(engine, &model, &run)];
            run!["info", run];
            let rows = json(args!["hotness", run, "-o", "json"]);
            let count = |row: &Value| row["count"].as_u64().unwrap();
            let layer = |layer: u64| {
                let rows = rows.as_array().unwrap().iter();
                rows.filter(move |row| row["layer_id"] == layer)
                    .map(count)
                    .sum::<u64>()
            };
            // Four experts of every token in every layer: a prompt of qwen3next is not pruned.
            let run = Run::open(&run).unwrap();
            let tokens = run.manifest.as_ref().unwrap().tokens;
            for il in 0..4 {
                assert_eq!(layer(il), 4 * (tokens.prompt + 12), "{engine}");
            }
        }
    }

    #[test]
    fn records_only_expert_operations_of_several_sequences() {
        let dir = tempfile::tempdir().unwrap();
        let [prompts, run] = ["prompts.jsonl", "run"].map(|name| dir.path().join(name));
        fs::write(&prompts, "{\"tokens\":[5,6,7]}\n{\"tokens\":[9,8],\"n_predict\":2}\n").unwrap();
        let model = repository("fixtures/random-qwen3moe-F16.gguf");
        run![
            "--quiet", "record", "--engine", "llama.cpp", "--model", model, "--prompts", prompts,
            "--n-predict", "4", "--trace", "experts", "--ignore-eos", "--out", run
        ];
        let run = Run::open(&run).unwrap();
        // three layers route all tokens, the last layer the generated tokens and the last token of each prompt; gate, up, down
        let rows = [(0, 3 + 4, 1 + 4), (1, 2 + 2, 1 + 2)];
        for (sequence, all, last) in rows {
            let records = run.trace.records().iter();
            let n = records.filter(|r| r.sequence_id.get() == sequence).count();
            assert_eq!(n, 3 * (3 * all + last), "sequence {sequence}");
        }
    }

    #[test]
    fn errors_of_llama_cpp_are_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("run");
        let embedded = ["record", "--engine", "llama.cpp", "--out", arg(&out)];
        assert!(fail![embedded].contains("--model"));
        // a complete GGUF file without a key that llama.cpp requires
        let model = dir.path().join("model.gguf");
        let mut bytes = fs::read(repository("fixtures/random-qwen3moe-F16.gguf")).unwrap();
        let key = b"qwen3moe.attention.head_count_kv";
        let at = bytes.windows(key.len()).position(|w| w == key).unwrap();
        bytes[at] = b'Q';
        fs::write(&model, bytes).unwrap();
        let line = fail![record("llama.cpp", &model, &out)];
        assert!(line.contains("llama.cpp cannot load the model: "), "{line}");
        fail![record("llama.cpp", &dir.path().join("none.gguf"), &out)];
        assert!(!out.exists());
    }

    /// The K cache of type q8_0 needs a head size that is a multiple of 32.
    #[test]
    fn keeps_the_old_run_if_llama_cpp_cannot_create_its_context() {
        let dir = tempfile::tempdir().unwrap();
        let [out, new] = ["run", "new"].map(|name| dir.path().join(name));
        let model = repository("fixtures/random-qwen3moe-F16.gguf");
        run![record("native", &model, &out)];
        let trace = fs::read(out.join("trace.bin")).unwrap();
        let types = ["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"];
        let line = fail![record("llama.cpp", &model, &out), types, "--force"];
        assert!(line.contains("does not divide n_embd_head_k=16"), "{line}");
        assert!(line.contains("or change --cache-type-k and --cache-type-v"), "{line}");
        assert!(fs::read(out.join("trace.bin")).unwrap() == trace);
        run!["info", out];
        fail![record("llama.cpp", &model, &new), types];
        assert!(!new.exists());
    }

    #[test]
    fn bench_columns_do_not_depend_on_the_engine() {
        let model = repository("fixtures/random-gpt-oss-F16.gguf");
        let rows = |engine| {
            json(args![
                "--quiet", "bench", "--engine", engine, "--model", model, "-p", "32", "-n", "4",
                "-r", "2", "-t", "1", "-o", "json"
            ])
        };
        let [ours, theirs] = ["native", "llama.cpp"].map(rows);
        for (ours, theirs) in ours
            .as_array()
            .unwrap()
            .iter()
            .zip(theirs.as_array().unwrap())
        {
            let keys = |row: &Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
            assert_eq!(keys(ours), keys(theirs));
            for key in ["n_prompt", "n_gen", "n_threads", "weight_bytes_per_token"] {
                assert_eq!(ours[key], theirs[key], "{key}");
            }
            assert!(theirs["avg_ts"].as_f64().unwrap() > 0.0);
            assert_eq!(ours["engine"], "native");
            assert_eq!(theirs["engine"], "llama.cpp");
        }
    }
}

/// Without a GPU, the error is one line and nothing is written; `auto` runs on the CPU.
#[test]
fn reports_missing_gpu() {
    if moe_executor::cuda::Gpu::detect().is_ok() {
        skip(Need::NoGpu, "this machine has a GPU");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let model = repository("fixtures/random-gpt-oss-F16.gguf");
    let with_device = |device| args![record("native", &model, &out), "--device", device];
    let line = fail![with_device("cuda")];
    assert!(
        line.contains("--device cuda: no CUDA driver")
            || line.contains("finds no GPU")
            || !cfg!(feature = "cuda") && line.contains("built without"),
        "{line}"
    );
    assert!(!out.exists());
    let bench = ["bench", "--model", arg(&model), "--device", "cuda"];
    assert!(fail![bench].contains("--device cuda"));
    run![with_device("auto")];
    let manifest = std::fs::read_to_string(out.join("manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    assert!(manifest["gpu"].is_null() && manifest["policy"] == "cpu");
}

/// Invalid settings are rejected before a model runs, with the valid values.
#[test]
fn rejects_invalid_gpu_settings() {
    let model = repository("fixtures/random-gpt-oss-F16.gguf");
    let refused = |options: &[&str]| {
        let args = args!["bench", "--model", model, options];
        fail![args]
    };
    for options in [&["--cpu-moe"][..], &["--policy", "gpu"], &["--postfetch-enable", "1"]] {
        let line = refused(options);
        assert!(
            line.contains(&format!(
                "{} has no effect without a GPU; add --device cuda",
                named(options)
            )),
            "{line}"
        );
    }
    let auto = |options: &[&str]| refused(&[&["--device", "auto"], options].concat());
    assert!(auto(&["--override-tensor", "exps"]).contains("REGEX=CPU"));
    let line = auto(&["--override-tensor", "x{1,2}=CPU"]);
    assert!(line.contains("`x{1` is not a rule") && line.contains("commas"), "{line}");
    let several = |options: &[&str]| refused(&[&["--device", "cuda:0,cuda:0"], options].concat());
    for (options, expected) in [
        (["-ot", "exps=CUDA2"], "CUDA2 is not in the list of devices, which has 2 GPUs"),
        (["--vram-mib", "1,2,3"], "--vram-mib has 3 values for 2 GPUs; pass one value for all"),
        (["-ts", "1,2,3"], "--tensor-split has 3 values for 2 GPUs; pass at most one"),
        (["-ts", "0,0"], "--tensor-split assigns no layer to any GPU"),
        (["-ts", "-1"], "expected a number of at least 0"),
    ] {
        let line = several(&options);
        assert!(line.contains(expected), "{options:?}: {line}");
    }
    let line = refused(&["--device", "gpu"]);
    assert!(
        line.contains("'gpu' for '--device <LIST>': expected cpu, auto, or up to 16 GPUs"),
        "{line}"
    );
    let line = auto(&["--policy", "gpu", "--postfetch-debug", "1"]);
    assert!(line.contains("--postfetch-debug has no effect without --policy post-fetch"), "{line}");
    let post_fetch = |options: &[&str]| auto(&[&["--policy", "post-fetch"], options].concat());
    assert!(post_fetch(&["--postfetch-block-on-miss", "2"]).contains("expected 0 or 1"));
    let line = post_fetch(&["--postfetch-max-transfers", "0"]);
    assert!(
        line.contains("'0' for '--postfetch-max-transfers <N>': out of range (1..=16384)"),
        "{line}"
    );
    assert!(post_fetch(&["--postfetch-scratchpad-mb", "much"]).contains("not an integer (0..="));
}

/// An empty variable is treated as unset; other values are checked like options.
#[test]
fn treats_empty_post_fetch_variables_as_unset() {
    const NAMES: [&str; 8] = [
        "ENABLE", "FORCE_CPU", "BLOCK_ON_MISS", "MAX_TRANSFERS", "SCRATCHPAD_MB",
        "USE_DEDICATED_STREAMS", "CPU_LIMIT", "DEBUG",
    ];
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (repository("fixtures/random-gpt-oss-F16.gguf"), dir.path().join("run"));
    let variables = NAMES.map(|name| format!("LLAMA_POSTFETCH_{name}"));
    let recording = || {
        let mut command = moe_analyze();
        command.args(record("native", &model, &out));
        command.args(["--device", "auto", "--policy", "post-fetch"]);
        command
    };
    for variable in &variables {
        let refused = recording().env(variable, "x").assert().code(2);
        let stderr = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
        assert!(stderr.contains(&format!("invalid value 'x' for {variable}: ")), "{stderr}");
        assert!(!out.exists());
    }
    let empty = variables.iter().map(|variable| (variable, ""));
    recording().envs(empty).assert().success();
}

/// llama.cpp's names of these options have the same effect.
#[test]
fn accepts_short_options_of_llama_cpp() {
    let model = repository("fixtures/random-gpt-oss-F16.gguf");
    let bench = ["--quiet", "bench", "--model", arg(&model), "-o", "csv"];
    let few = ["-p", "2", "-n", "1", "-r", "1", "-t", "1", "--device", "auto"];
    for spelled in [
        &["-ngl", "-1"][..],
        &["-ngl", "2", "-ncmoe", "1"],
        &["-cmoe"],
        &["-ot", "exps=CPU"],
        &["-ctk", "f16", "-ctv", "f32"],
    ] {
        let text = run![bench, few, spelled];
        assert_eq!(text.lines().count(), 3, "{spelled:?}: {text}");
    }
    assert!(fail!["info", "--", "-ot"].contains("-ot: "));
    for (wrong, expected) in [
        (&["-ngl", "x"][..], "invalid value 'x' for '--n-gpu-layers <N>'"),
        (
            &["-ncmoe", "1", "-cmoe"],
            "the argument '--n-cpu-moe <N>' cannot be used with '--cpu-moe'",
        ),
        (&["-ctk", "q9"], "invalid value 'q9' for '--cache-type-k <TYPE>'"),
        (&["-ngl", "-2"], "invalid value '-2' for '--n-gpu-layers <N>'"),
    ] {
        let error = fail![bench, few, wrong];
        assert!(error.contains(expected), "{wrong:?}: {error}");
    }
}
