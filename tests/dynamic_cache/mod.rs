//! `--policy dynamic`: results, counts, options, and what a run directory stores. Without a GPU, slots are in CPU memory.

mod ahead;
mod counts;
mod failures;
mod options;

use std::path::{Path, PathBuf};

use moe_trace::dynamic_cache::DynamicCache;
use moe_trace::{ExpertId, LayerId, Manifest, Run};
use serde_json::json;
use tempfile::TempDir;

use crate::support::{arg, file_of, run};

/// Three prompts with different experts, the first two longer than a batch.
const PROMPTS: &str = concat!(
    r#"{"prompt": "The kernel driver is responsible for"}"#,
    "\n",
    r#"{"prompt": "int main(void) { return 0; }"}"#,
    "\n",
    r#"{"prompt": "Das"}"#,
    "\n",
);

/// A model with 4 layers of 8 experts, and a directory for runs.
struct Workplace {
    dir: TempDir,
    model: PathBuf,
    prompts: PathBuf,
}

impl Workplace {
    /// With weights of the type `quant`. An F32 expert has 0.75 MiB.
    fn new(quant: &str) -> Workplace {
        let dir = tempfile::tempdir().unwrap();
        let spec = json!({
            "arch": "qwen3moe", "n_layer": 4, "n_embd": 256, "n_head": 4, "n_head_kv": 2,
            "head_dim": 64, "n_expert": 8, "n_expert_used": 2, "n_ff_exp": 256,
            "vocab": { "n_tokens": 1000, "pre": "qwen2" },
        });
        let spec = file_of(dir.path(), "spec.json", spec.to_string());
        let model = dir.path().join("model.gguf");
        run!["--quiet", "synth", "--spec", spec, "--quant", quant, "--out", model];
        let prompts = file_of(dir.path(), "prompts.jsonl", PROMPTS);
        Workplace {
            dir,
            model,
            prompts,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Records all prompts and returns the run directory.
    fn record(&self, name: &str, options: &[&str]) -> PathBuf {
        let out = self.path(name);
        let inputs = ["--model", arg(&self.model), "--prompts", arg(&self.prompts)];
        let batch: &[&str] = if options.contains(&"-b") {
            &[]
        } else {
            &["-b", "4"]
        };
        run!["--quiet", "record", inputs, "-n", "12", "-t", "2", batch, "--out", out, options];
        out
    }
}

/// Layer, token, and the selected experts with the bits of their weights.
type Decision = (LayerId, u32, Vec<(ExpertId, Option<u32>)>);

/// The routing decisions of a run. They depend on all tokens and activations.
fn routing(run: &Path) -> Vec<Decision> {
    let mut decisions = Vec::new();
    for operation in Run::open(run).unwrap().routing() {
        let layer = operation.head().layer().unwrap();
        for token in operation.tokens() {
            let experts = token.experts();
            let experts = experts.map(|expert| (expert.expert_id, expert.weight.map(f32::to_bits)));
            decisions.push((layer, token.token_id().0, experts.collect()));
        }
    }
    decisions
}

fn dynamic_cache(run: &Path) -> DynamicCache {
    let manifest = Manifest::of_run(run).unwrap().unwrap();
    assert_eq!(manifest.policy, "dynamic");
    manifest.dynamic_cache.unwrap()
}
