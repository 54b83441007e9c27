//! All commands from a model to a hot cache, for each description in `fixtures/architectures`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use moe_synth::model::{Description, Key};
use moe_trace::record::lane;
use moe_trace::{LayerId, Manifest, Run};
use serde_json::Value;

use crate::support::{args, fail, file_of, repository, run};

/// Two sequences: 9 prompt tokens, 4 generated tokens.
const PROMPTS: &str = concat!(
    r#"{"tokens": [3, 1, 4, 1, 5, 9], "n_predict": 2}"#,
    "\n",
    r#"{"tokens": [2, 6, 5], "n_predict": 2}"#,
    "\n",
);
const N_TOKENS: u64 = 13;

/// Tokens with logits: the last of each prompt, and the generated ones.
const N_OUTPUTS: u64 = 6;

/// Architectures that compute all tokens in the last layer. The others omit tokens without logits.
const ALL_TOKENS_IN_LAST_LAYER: [&str; 6] =
    ["cohere2moe", "gemma4", "nemotron_h_moe", "qwen35moe", "qwen3next", "step35"];

/// Architectures whose experts have no gate, and are therefore not in a hot cache.
const WITHOUT_GATE: [&str; 1] = ["nemotron_h_moe"];

/// A description, and what its model must have.
struct Case {
    arch: String,
    file: PathBuf,
    /// Experts per token of each layer with experts, without the blocks of an MTP head.
    used: BTreeMap<LayerId, u64>,
    /// Activations of each layer with experts.
    activations: BTreeMap<LayerId, u64>,
}

impl Case {
    fn read(file: PathBuf) -> Case {
        let description: Description = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let number = |key: &str| match description.keys.get(key) {
            Some(Key::Number(n)) => *n,
            None => 0,
            Some(other) => panic!("{key}: {other:?}"),
        };
        let n_layer = number("block_count") - number("nextn_predict_layers");
        let with_router = description
            .layers
            .iter()
            .filter(|range| range.tensors.contains_key("ffn_gate_inp.weight"));
        let layers: BTreeSet<u32> = with_router
            .flat_map(|range| range.from..range.to.min(n_layer))
            .collect();
        let used = |layer: u32| match &description.keys["expert_used_count"] {
            Key::Number(n) => u64::from(*n),
            Key::Numbers(list) => list[layer as usize].into(),
            other => panic!("{other:?}"),
        };
        let arch = description.arch.clone();
        let all_in_last = ALL_TOKENS_IN_LAST_LAYER.contains(&arch.as_str());
        let tokens = |layer: u32| {
            if layer + 1 == n_layer && !all_in_last {
                N_OUTPUTS
            } else {
                N_TOKENS
            }
        };
        let id = |layer: u32| LayerId(u16::try_from(layer).unwrap());
        Case {
            arch,
            file,
            activations: layers
                .iter()
                .map(|&layer| (id(layer), tokens(layer) * used(layer)))
                .collect(),
            used: layers
                .iter()
                .map(|&layer| (id(layer), used(layer)))
                .collect(),
        }
    }

    fn n_layers(&self) -> u64 {
        self.used.len() as u64
    }
}

/// The cases whose index has the remainder `part` of 3.
fn cases(part: usize) -> Vec<Case> {
    let files = fs::read_dir(repository("fixtures/architectures")).unwrap();
    let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 28, "{files:?}");
    let files = files.into_iter().skip(part).step_by(3);
    files.map(Case::read).collect()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Sum of a column of each layer. Rows without a layer are omitted.
fn sums(rows: &Value, column: &str) -> BTreeMap<LayerId, u64> {
    let mut sums = BTreeMap::new();
    for row in rows.as_array().unwrap() {
        if let Some(layer) = row["layer_id"].as_u64() {
            let layer = LayerId(u16::try_from(layer).unwrap());
            *sums.entry(layer).or_default() += row[column].as_u64().unwrap();
        }
    }
    sums
}

/// Activations of each layer of a run, and those of the hot cache.
fn activations_of(run: &Path, case: &Case) -> (BTreeMap<LayerId, u64>, u64) {
    let (mut counts, mut hot) = (BTreeMap::new(), 0);
    for operation in Run::open(run).unwrap().routing() {
        let layer = operation.head().layer().unwrap();
        for token in operation.tokens() {
            let experts: Vec<_> = token.experts().collect();
            assert_eq!(experts.len() as u64, case.used[&layer], "{}", case.arch);
            *counts.entry(layer).or_default() += experts.len() as u64;
            hot += experts
                .iter()
                .filter(|expert| expert.lane == lane::HOT_CACHE)
                .count() as u64;
        }
    }
    (counts, hot)
}

fn check(case: &Case, quant: &str) {
    let arch = &case.arch;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (model, recorded, cached) = (path("model.gguf"), path("run"), path("cached"));
    let (learn, plan_file) = (path("learn.json"), path("plan.json"));
    let prompts = file_of(dir.path(), "prompts.jsonl", PROMPTS);
    run!["--quiet", "synth", "--spec", case.file, "--quant", quant, "--zipf", "0", "--out", model];

    let how = args!["--model", model, "--prompts", prompts, "--ignore-eos", "-t", "1"];
    run!["--quiet", "record", how, "--out", recorded];
    let facts = json(&run!["info", recorded, "-o", "json"]);
    assert_eq!(facts["sound"], true, "{arch}: {facts}");
    assert_eq!(facts["architecture"], arch.as_str());
    assert_eq!(facts["prompt_tokens"], 9, "{arch}");
    assert_eq!(facts["generated_tokens"], 4, "{arch}");
    assert_eq!(activations_of(&recorded, case), (case.activations.clone(), 0), "{arch}");

    let hotness = json(&run!["--quiet", "hotness", recorded, "-o", "json"]);
    assert_eq!(sums(&hotness, "count"), case.activations, "{arch}");
    run!["--quiet", "hotness", recorded, "--out", learn];

    // The check of the file succeeds, and each layer has the rows of its experts.
    let map = json(&run!["--quiet", "gguf-map", model, "--check-overlaps", "-o", "json"]);
    let experts = map.as_array().unwrap().iter().filter(|row| {
        let layer = row["layer_id"]
            .as_u64()
            .and_then(|id| u16::try_from(id).ok());
        row["category"] == "expert" && layer.is_some_and(|id| case.used.contains_key(&LayerId(id)))
    });
    let experts: Vec<&Value> = experts.collect();
    let layers: BTreeSet<u64> = experts
        .iter()
        .map(|row| row["layer_id"].as_u64().unwrap())
        .collect();
    assert_eq!(layers.len() as u64, case.n_layers(), "{arch}");
    let ids: BTreeSet<u64> = experts
        .iter()
        .map(|row| row["expert_id"].as_u64().unwrap())
        .collect();
    assert!(ids.into_iter().eq(0..8), "{arch}");
    let size: u64 = experts
        .iter()
        .map(|row| row["size_bytes"].as_u64().unwrap())
        .sum();

    // 3/4 of the size of all experts.
    let budget = size * 3 / 4;
    let plan = run![
        "--quiet",
        "plan",
        learn,
        "--model",
        model,
        "--budget-bytes",
        budget.to_string(),
        "-o",
        "json"
    ];
    fs::write(&plan_file, &plan).unwrap();
    let plan = json(&plan);
    let planned = &plan["lanes"][0];
    assert_eq!(planned["budget_bytes"], budget, "{arch}");
    assert_eq!(planned["layers"], case.n_layers(), "{arch}: {planned}");
    let used = planned["used_bytes"].as_u64().unwrap();
    assert!(used > 0 && used <= budget, "{arch}: {planned}");
    // One of the 6 experts per layer that fit is empty.
    let n_planned = planned["experts"].as_u64().unwrap();
    assert!((case.n_layers()..=6 * case.n_layers()).contains(&n_planned), "{arch}: {planned}");

    let replayed = ["-r", "1", "-t", "1", "-o", "json"];
    let replayed = json(&run!["--quiet", "replay", recorded, "--model", model, replayed]);
    assert_eq!(sums(&replayed, "cpu"), case.activations, "{arch}");

    let simulated = ["--budget-mib", "1", "--policy", "lru", "-o", "json"];
    let simulated = json(&run!["--quiet", "simulate", recorded, simulated]);
    assert_eq!(simulated.as_array().unwrap().len(), 1, "{arch}");
    let look_ups = simulated[0]["look_ups"].as_u64().unwrap();
    let hits = simulated[0]["hits"].as_u64().unwrap();
    let n_activations: u64 = case.activations.values().sum();
    assert!(hits < look_ups && look_ups <= n_activations, "{arch}: {simulated}");

    let policy = args!["--policy", "hot-cache", "--hot-cache", plan_file];
    run!["--quiet", "record", how, policy, "--out", cached];
    let (activations, hot) = activations_of(&cached, case);
    assert_eq!(activations, case.activations, "{arch}");
    assert_eq!(hot > 0, !WITHOUT_GATE.contains(&arch.as_str()), "{arch}: {hot} of the cache");
    let cache = Manifest::of_run(&cached)
        .unwrap()
        .unwrap()
        .hot_cache
        .unwrap();
    assert_eq!(cache.lanes.len(), 1, "{arch}");
    assert_eq!(cache.lanes[0].budget_bytes, budget, "{arch}");
    let reason = cache.failures.unwrap().first_error;
    let is_uncached = WITHOUT_GATE.contains(&arch.as_str());
    let expected = is_uncached.then_some("experts without a gate projection cannot be cached");
    assert_eq!(reason.as_deref(), expected, "{arch}");
}

#[test]
fn all_commands_run_in_f16() {
    cases(0).iter().for_each(|case| check(case, "F16"));
}

#[test]
fn all_commands_run_in_q8_0() {
    cases(1).iter().for_each(|case| check(case, "Q8_0"));
}

#[test]
fn all_commands_run_with_experts_in_mxfp4() {
    cases(2).iter().for_each(|case| check(case, "MXFP4_MOE"));
}

#[test]
fn rejects_types_whose_blocks_are_longer_than_all_rows() {
    let dir = tempfile::tempdir().unwrap();
    let spec = repository("fixtures/architectures/arctic.json");
    let out = dir.path().join("model.gguf");
    let error = fail!["synth", "--spec", spec, "--quant", "Q4_K_M", "--out", out];
    assert!(error.contains("Q4_K has blocks of 256 elements"), "{error}");
    let error = fail!["synth", "--spec", spec, "--layers", "4", "--out", out];
    assert!(error.contains("4 is out of range (1..=3)"), "{error}");
    assert!(!out.exists());
}

#[test]
fn writes_published_shapes_of_described_models() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model.gguf");
    for (name, n_layer, n_experts) in [
        ("glm-4.5-air", "2", 3 * 128),
        ("nemotron-3-nano-30b-a3b", "7", 3 * 2 * 128),
        ("qwen35moe-35b-a3b", "4", 4 * 3 * 256),
    ] {
        run!["synth", "--like", name, "--layers", n_layer, "--sparse", "--out", out, "--force"];
        let map = run!["--quiet", "gguf-map", out, "--check-overlaps", "-o", "csv"];
        let experts = map.lines().filter(|line| line.contains(",expert,"));
        assert_eq!(experts.count(), n_experts, "{name}");
    }
}
