//! `--policy hot-cache`: counters, updates, options, and what a run directory stores of them. Without a GPU, lanes are on the CPU.

mod counters;
mod options;
mod updates;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use moe_placement::learn::LearnFile;
use moe_trace::record::lane;
use moe_trace::{LayerId, Manifest, Run};
use tempfile::TempDir;

use crate::support::{file_of, repository, run};

fn model() -> PathBuf {
    repository("fixtures/tiny-qwen3moe-Q4_K_M.gguf")
}

/// Three prompts with different experts.
const PROMPTS: &str = concat!(
    r#"{"prompt": "The kernel driver is responsible for"}"#,
    "\n",
    r#"{"prompt": "int main(void) { return 0; }"}"#,
    "\n",
    r#"{"prompt": "Das Wetter ist heute sehr schön"}"#,
    "\n",
);

/// A directory with the prompts, and a learn file of a run over the first of them.
struct Workplace {
    dir: TempDir,
    prompts: PathBuf,
    learn: PathBuf,
}

impl Workplace {
    fn new() -> Workplace {
        let dir = tempfile::tempdir().unwrap();
        let prompts = file_of(dir.path(), "prompts.jsonl", PROMPTS);
        let first = dir.path().join("first");
        let prompt = ["--prompt", "The kernel driver is responsible for", "-n", "24"];
        run!["--quiet", "record", "--model", model(), prompt, "--out", first];
        let learn = dir.path().join("learn.json");
        run!["--quiet", "hotness", first, "--out", learn];
        Workplace {
            dir,
            prompts,
            learn,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Records all prompts with a cache, and returns the run directory.
    fn record(&self, name: &str, options: &[&str]) -> PathBuf {
        let out = self.path(name);
        let how = ["-n", "8", "--policy", "hot-cache"];
        run![
            "--quiet",
            "record",
            "--model",
            model(),
            "--prompts",
            self.prompts,
            how,
            "--out",
            out,
            options
        ];
        out
    }
}

/// Expert slots of hot lanes and of the cold lane.
type Slots = BTreeMap<LayerId, (u64, u64)>;

/// Slots of each layer in the records of a run.
fn slots_of_trace(run: &Path) -> Slots {
    let mut slots = Slots::new();
    for operation in Run::open(run).unwrap().routing() {
        let layer = operation.head().layer().unwrap();
        for expert in operation.tokens().flat_map(|token| token.experts()) {
            let (hot, cold) = slots.entry(layer).or_default();
            match expert.lane {
                lane::HOT_CACHE => *hot += 1,
                lane::CPU => *cold += 1,
                other => panic!("lane {other} of layer {layer}"),
            }
        }
    }
    slots
}

/// `perf.json` of a run.
fn report(run: &Path) -> LearnFile {
    LearnFile::parse(&fs::read_to_string(run.join("perf.json")).unwrap()).unwrap()
}

/// Slots of each layer in `perf.json`.
fn slots_of_report(run: &Path) -> Slots {
    let slots = report(run).layer_slots().unwrap().into_iter();
    slots
        .map(|layer| (layer.layer, (layer.hot, layer.cold)))
        .collect()
}

fn sum(slots: &Slots) -> (u64, u64) {
    let sum = |(hot, cold), &(more_hot, more_cold)| (hot + more_hot, cold + more_cold);
    slots.values().fold((0, 0), sum)
}

fn hot_cache(run: &Path) -> moe_trace::hot_cache::HotCache {
    let manifest = Manifest::of_run(run).unwrap().unwrap();
    assert_eq!(manifest.policy, "hot-cache");
    manifest.hot_cache.unwrap()
}
