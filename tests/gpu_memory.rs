//! GPU memory of a run, compared with the plan of its cache, with a replacement for the driver.

use std::collections::BTreeMap;

use moe_trace::{ExpertId, LayerId, Manifest};
use serde_json::Value;

use crate::support::gpu::{stand_in, with_gpu};
use crate::support::{args, repository, run};

/// Scratch buffers of kernels that the plan omits, because they are small: eight of at least 64 KiB, of which attention, the tables of
/// experts and the lanes have one or more. Only in tiny models are they a large part of the memory.
const SMALL_BUFFERS: u64 = 8 << 16;

/// The command that `plan` prints builds the cache of the plan, and needs at most the memory that the plan contains.
#[test]
fn printed_command_runs_in_the_planned_memory() {
    let Some(stand_in) = stand_in() else { return };
    let dir = tempfile::tempdir().unwrap();
    for (name, ty) in [
        ("random-gpt-oss-F16", "f32"),
        ("random-qwen3moe-F16", "f16"),
        ("tiny-qwen3moe-Q4_K_M", "q8_0"),
    ] {
        let model = repository(&format!("fixtures/{name}.gguf"));
        let path = |file: &str| dir.path().join(format!("{name}-{file}"));
        let (first, learn, out) = (path("first"), path("learn.json"), path("run"));
        let prompt = ["-p", "The kernel driver is responsible for the", "-n", "4", "--ignore-eos"];
        let how = ["-t", "1", "--ctx-size", "64"];
        run!["--quiet", "record", "--model", model, prompt, how, "--out", first];
        run!["--quiet", "hotness", first, "--out", learn];
        let options = ["--budget-mib", "1", "--ctx", "64", "--cache-type-k", ty, "-o", "json"];
        let plan = run!["--quiet", "plan", learn, "--model", model, options];
        let plan: Value = serde_json::from_str(&plan).unwrap();

        let command = plan["moe_analyze"]["command"].as_str().unwrap();
        let words: Vec<&str> = command.split(' ').skip(1).collect();
        let args = args![words, prompt, "-t", "1", "--out", out];
        with_gpu(stand_in.path(), "", args).assert().success();
        let manifest = Manifest::of_run(&out).unwrap().unwrap();

        let mut selected: BTreeMap<LayerId, Vec<ExpertId>> = BTreeMap::new();
        for place in plan["selected"].as_array().unwrap() {
            let number = |key: &str| place[key].as_u64().unwrap();
            let layer = LayerId(number("layer") as u16);
            let expert = ExpertId(number("expert") as u32);
            selected.entry(layer).or_default().push(expert);
        }
        assert!(!selected.is_empty());
        assert_eq!(manifest.hot_cache.as_ref().unwrap().lanes[0].experts, selected, "{name}");

        let gpu = &plan["memory"]["gpus"][0];
        let bytes = |value: &Value| value.as_u64().unwrap();
        let parts = gpu["moe_analyze"].as_object().unwrap().values();
        let planned = parts.map(bytes).sum::<u64>() + bytes(&gpu["tensor_bytes"]);
        let planned = planned + bytes(&gpu["hot_cache_bytes"]);
        let used = manifest.gpus()[0].peak_bytes.unwrap();
        let limits = planned / 2..=planned + SMALL_BUFFERS;
        assert!(limits.contains(&used), "{name}: {used} of {planned} bytes");
    }
}
