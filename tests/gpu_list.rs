//! Lists of GPUs, with a replacement for their driver.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use moe_trace::buffers::{self, Change};
use moe_trace::record::SOURCE_BUFFER;
use moe_trace::{LayerId, Run};
use serde_json::Value;

use crate::support::gpu::{stand_in, with_gpu};
use crate::support::{args, file_of, repository, run};

/// Records a few tokens on the devices of a list; the machine has two GPUs.
fn record(stand_in: &Path, out: &Path, options: &[&str]) -> assert_cmd::assert::Assert {
    let model = repository("fixtures/random-gpt-oss-F16.gguf");
    let record = ["record", "-p", "The", "-n", "2", "-t", "1", "--ignore-eos"];
    let args = args![record, "--model", model, "--out", out, options];
    let mut command = with_gpu(stand_in, "", args);
    command.env("STAND_IN_GPUS", "2").assert()
}

#[test]
fn manifest_and_buffers_contain_every_device() {
    let Some(stand_in) = stand_in() else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let list = ["--device", "cuda:1,cuda:0,cuda:1", "--vram-mib", "4,3,2"];
    let done = record(stand_in.path(), &out, &list).success();
    let stderr = String::from_utf8_lossy(&done.get_output().stderr).into_owned();
    assert!(stderr.contains("CUDA0, cuda:1: Stand-in, 4.0 GiB, policy gpu"), "{stderr}");

    let run = Run::open(&out).unwrap();
    let manifest = run.manifest.as_ref().unwrap();
    let device =
        |name: &str, ordinal, mib: u64| (Some(name.to_owned()), Some(ordinal), Some(mib << 20));
    let gpus = manifest.gpus().iter();
    let gpus: Vec<_> = gpus
        .map(|gpu| (gpu.device.clone(), gpu.ordinal, gpu.limit_bytes))
        .collect();
    let expected = [device("CUDA0", 1, 4), device("CUDA1", 0, 3), device("CUDA2", 1, 2)];
    assert_eq!(gpus, expected);
    assert_eq!(manifest.gpu.as_ref(), manifest.gpus().first());
    for gpu in manifest.gpus() {
        assert!(gpu.peak_bytes > Some(0) && gpu.peak_bytes <= gpu.limit_bytes, "{gpu:?}");
    }

    // A GPU's layers: the ids of their caches, and the sources of operations there.
    let events = buffers::read(&out.join(buffers::FILE_NAME)).unwrap();
    let allocated = events.iter().filter_map(|event| match &event.change {
        Change::Alloc(buffer) => Some(buffer),
        Change::Dealloc { .. } => None,
    });
    let mut ids = BTreeSet::new();
    let mut caches = BTreeSet::new();
    for buffer in allocated {
        ids.insert(buffer.buffer_id);
        if buffer.name.starts_with("cache_k") && buffer.backend != "CPU" {
            caches.insert((buffer.layer, buffer.backend.as_str()));
        }
    }
    let caches: Vec<_> = caches.into_iter().collect();
    assert_eq!(
        caches,
        [(0, "CUDA0"), (1, "CUDA0"), (2, "CUDA0"), (3, "CUDA1")]
            .map(|(layer, gpu)| (Some(LayerId(layer)), gpu))
    );
    for record in run.trace.records() {
        let sources = record.sources().iter();
        for source in sources.filter(|source| source.memory_source == SOURCE_BUFFER) {
            let id = source.offset_or_buffer_id.get();
            let is_known = ids.contains(&id) || source.name() == "attn_inp_kq_mask";
            assert!(is_known, "{} of buffer {id}", source.name());
        }
    }
    let facts: Value = serde_json::from_str(&run!["info", &out, "-o", "json"]).unwrap();
    assert_eq!(facts["sound"], true, "{facts}");
}

#[test]
fn reports_missing_gpu_of_a_list() {
    let Some(stand_in) = stand_in() else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let refused = record(stand_in.path(), &out, &["--device", "cuda:1,cuda:2"]).code(2);
    let line = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
    assert_eq!(line.lines().count(), 1, "{line}");
    let expected =
        "--device cuda:1,cuda:2: there is no GPU 2: the CUDA driver finds 2, counted from 0";
    assert!(line.contains(expected), "{line}");
    assert!(!out.exists());
}

/// A learn file with one expert.
fn learn_file(dir: &Path) -> PathBuf {
    let learn =
        r#"{"schema":"llama.cpp.moe_layer_opt_perf.v1","layers":[{"layer":0,"experts":[[1,2]]}]}"#;
    file_of(dir, "learn.json", learn)
}

/// An automatic budget subtracts the memory that `plan` computes for each GPU, not an equal part of their sum.
#[test]
fn automatic_budgets_of_a_hot_cache_agree_with_plan() {
    let Some(stand_in) = stand_in() else { return };
    let dir = tempfile::tempdir().unwrap();
    let model = repository("fixtures/random-gpt-oss-F16.gguf");
    let learn = learn_file(dir.path());
    let auto = ["--device", "cuda:0,cuda:1", "--hot-cache-mib", "auto,auto"];
    let types = ["--cache-type-k", "f16", "--cache-type-v", "f16"];
    let out = dir.path().join("run");
    let options = args!["--policy", "hot-cache", "--hot-cache", learn, auto, types];
    let options: Vec<&str> = options
        .iter()
        .map(|option| option.to_str().unwrap())
        .collect();
    let done = record(stand_in.path(), &out, &options).success();
    let stderr = String::from_utf8_lossy(&done.get_output().stderr).into_owned();

    let manifest = Run::open(&out).unwrap().manifest.unwrap();
    let n_ctx = manifest.kv_cache.unwrap().n_positions.unwrap();
    let budgets = ["--budget-mib", "auto,auto", "--free-mib", "4096,4096", "-o", "json"];
    let plan = run!["plan", learn, "--model", model, "--ctx", n_ctx.to_string(), budgets];
    let plan: Value = serde_json::from_str(&plan).unwrap();
    let gpus = plan["memory"]["gpus"].as_array().unwrap();
    let needed: Vec<f64> = gpus
        .iter()
        .map(|gpu| {
            let parts = gpu["moe_analyze"].as_object().unwrap().values();
            let bytes = parts.map(|bytes| bytes.as_u64().unwrap()).sum::<u64>();
            let bytes = bytes + gpu["tensor_bytes"].as_u64().unwrap();
            (bytes as f64 / f64::from(1 << 20) * 100.0).round() / 100.0
        })
        .collect();
    assert_ne!(needed[0], needed[1]);
    for (lane, (needed, reserve)) in needed.iter().zip([1024, 512]).enumerate() {
        let start = format!("lane {lane}: budget ");
        let end =
            format!("(4096 MiB free - {needed} MiB model and context - {reserve} MiB reserve)");
        let line = stderr.lines().find(|line| line.starts_with(&start));
        assert!(line.is_some_and(|line| line.ends_with(&end)), "{end}: {stderr}");
    }
}

#[test]
fn lanes_of_a_hot_cache_are_on_the_given_devices() {
    let Some(stand_in) = stand_in() else { return };
    let dir = tempfile::tempdir().unwrap();
    let learn = learn_file(dir.path());
    let learn = learn.to_str().unwrap();
    let out = dir.path().join("run");
    let cache = ["--policy", "hot-cache", "--hot-cache", learn, "--hot-cache-mib", "1,1,1"];
    let with = |devices: &[&str]| {
        let options = [&["--device", "cuda:0,cuda:1", "--force"][..], &cache, devices].concat();
        record(stand_in.path(), &out, &options)
    };
    let devices = ["CUDA1", "CPU", "CUDA0"];
    with(&["--hot-cache-device", &devices.join(",")]).success();
    let manifest = Run::open(&out).unwrap().manifest.unwrap();
    let lanes = manifest.hot_cache.unwrap().lanes;
    let used: Vec<&str> = lanes.iter().map(|lane| lane.device.as_str()).collect();
    assert_eq!(used, devices);
    for (devices, expected) in [
        ("CUDA1,CUDA1,CPU", "two lanes of the hot cache are on CUDA1"),
        ("CUDA1,CUDA0,CUDA2", "CUDA2 is not in the list of devices, which has 2 GPUs"),
        ("CUDA1,CUDA0", "3 lanes for 2 GPUs"),
    ] {
        let failed = with(&["--hot-cache-device", devices]).code(2);
        let stderr = String::from_utf8_lossy(&failed.get_output().stderr).into_owned();
        assert!(stderr.contains(expected), "{devices}: {stderr}");
    }
}
