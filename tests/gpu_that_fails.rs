//! A GPU that is seen and fails, by a stand-in for its driver.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use moe_trace::record::{FLAG_CPU_FALLBACK, lane};

use crate::support::gpu::{stand_in, with_gpu};
use crate::support::{arg, args, repository, run};

fn model() -> PathBuf {
    repository("fixtures/random-gpt-oss-F16.gguf")
}

/// Records a few tokens.
fn record(model: &Path, out: &Path) -> Vec<OsString> {
    args!["record", "-p", "The", "-n", "2", "-t", "1", "--model", model, "--out", out]
}

/// Each step at which a GPU may fail to open, and what is told of it.
const OPENING: [(&str, &str); 4] = [
    ("old", "the driver supports CUDA 11.8; the kernels need 12.4"),
    (
        "open",
        "opening the GPU failed: CUDA_ERROR_DEVICE_UNAVAILABLE, CUDA-capable device(s) is/are busy or unavailable; another process",
    ),
    ("capability", "the GPU has compute capability 7.0; the kernels need 7.5"),
    ("stream", "creating a stream failed: CUDA_ERROR_OUT_OF_MEMORY, out of memory; "),
];

#[test]
fn one_that_does_not_open_leaves_the_processor_or_one_line() {
    let Some(stand_in) = stand_in() else { return };
    let dir = tempfile::tempdir().unwrap();
    let model = model();
    for (fails, says) in OPENING {
        let out = dir.path().join(fails);
        let recorded = |device| {
            let how = ["--device", device, "--policy", "post-fetch"];
            let args = args![record(&model, &out), how];
            with_gpu(stand_in.path(), fails, &args)
        };
        let refused = recorded("cuda").assert().code(2).stdout("");
        let line = String::from_utf8_lossy(&refused.get_output().stderr);
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(line.starts_with(&format!("moe-analyze: --device cuda: {says}")), "{line}");
        assert!(!out.exists(), "{fails}: a run that did not begin");

        let done = recorded("auto").assert().success();
        let stderr = String::from_utf8_lossy(&done.get_output().stderr);
        assert!(stderr.contains(says) && stderr.contains("; the processor computes"), "{stderr}");
        let manifest = moe_trace::Run::open(&out).unwrap().manifest.unwrap();
        assert_eq!((manifest.policy.as_str(), manifest.gpu), ("cpu", None));
    }
}

#[test]
fn a_replay_does_not_begin_a_run_either() {
    let Some(stand_in) = stand_in() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (run, out) = (dir.path().join("run"), dir.path().join("out"));
    let model = model();
    run!["--quiet", record(&model, &run)];
    let replay = |device| {
        let args = ["replay", arg(&run), "--model", arg(&model), "-t", "1", "--device", device];
        with_gpu(stand_in.path(), "open", args![args, "--out", out])
    };
    replay("cuda").assert().code(2).stdout("");
    assert!(!out.exists());
    replay("auto").assert().success();
    assert!(out.exists());
}

/// A GPU without memory: the processor does all, and records, manifest and rows say so.
#[test]
fn reports_cpu_fallbacks_with_the_figures() {
    let Some(stand_in) = stand_in() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (out, alone) = (dir.path().join("run"), dir.path().join("alone"));
    let model = model();
    let record = |out| args![record(&model, out), "--ignore-eos"];
    let gpu = ["--device", "cuda", "--policy", "post-fetch"];
    let small = ["--postfetch-scratchpad-mb", "1", "--postfetch-debug", "1"];
    let mut command = with_gpu(stand_in.path(), "memory", args![record(&out), gpu, small]);
    command.env("LLAMA_POSTFETCH_MAX_TRANSFERS", "3");
    command.env("GGML_OP_OFFLOAD_MIN_BATCH", "");
    let done = command.assert().success();
    let stderr = String::from_utf8_lossy(&done.get_output().stderr);
    assert!(stderr.contains(": copy not started, "), "{stderr}");
    // The text is the processor's own.
    let own = run![record(&alone)];
    assert_eq!(String::from_utf8_lossy(&done.get_output().stdout), own);

    let run = moe_trace::Run::open(&out).unwrap();
    let gpu_of_run = run.manifest.as_ref().unwrap().gpu.clone().unwrap();
    let fallbacks = gpu_of_run.fallbacks.unwrap();
    assert!(fallbacks.operations > 0 && fallbacks.tensors > 0, "{fallbacks:?}");
    let first = fallbacks.first_error.unwrap();
    assert!(first.contains("CUDA_ERROR_OUT_OF_MEMORY, out of memory"), "{first}");
    assert_eq!(gpu_of_run.offload_min_batch, Some(32));
    let settings = gpu_of_run.post_fetch.unwrap();
    assert!(settings.enable && settings.block_on_miss && !settings.force_cpu);
    assert_eq!((settings.max_transfers, settings.scratchpad_mb), (3, 1));
    let mut down = 0;
    for record in run.trace.records() {
        if record.dst_name().starts_with("ffn_moe_down-") {
            down += 1;
            assert!(record.has_flag(FLAG_CPU_FALLBACK), "{}", record.dst_name());
            assert_eq!(record.expert_lane[0], lane::POST_FETCH_MISS);
        }
    }
    assert!(down > 0);

    let bench =
        args!["--quiet", "bench", "--model", model, "-t", "1", "-p", "0", "-n", "1", "-r", "1"];
    let args = args![bench, gpu, "-o", "json"];
    let done = with_gpu(stand_in.path(), "memory", &args)
        .assert()
        .success();
    let rows: serde_json::Value = serde_json::from_slice(&done.get_output().stdout).unwrap();
    assert!(rows[0]["fallbacks"].as_u64().unwrap() > 0, "{rows}");
}
