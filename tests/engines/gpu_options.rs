//! GPU options without a GPU, and variables and short names of options.

use std::fs;

use moe_testkit::{Need, skip};

use super::{named, record};
use crate::support::{arg, args, fail, moe_analyze, repository, run};

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
    let manifest = fs::read_to_string(out.join("manifest.json")).unwrap();
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
