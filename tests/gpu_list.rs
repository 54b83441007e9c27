//! Lists of GPUs, with a replacement for their driver.

use std::collections::BTreeSet;
use std::path::Path;

use moe_trace::buffers::{self, Change};
use moe_trace::record::SOURCE_BUFFER;
use moe_trace::{LayerId, Run};
use serde_json::Value;

use crate::support::gpu::{stand_in, with_gpu};
use crate::support::{args, repository, run};

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
