//! The linked llama.cpp reproduces the results in `fixtures/reference`. With `MOE_BLESS=1`, the files are written instead, and
//! the distances between variants of llama.cpp are printed:
//!
//! `MOE_BLESS=1 cargo test -p moe-llama-cpp --features llama-cpp --test it references::random -- --nocapture`

use std::collections::{BTreeMap, BTreeSet};

use moe_gguf::{Gguf, Value};
use moe_llama_cpp::Model;
use serde::{Deserialize, Serialize};

use crate::compare::Distance;
use crate::engines::{Answer, OTHERS, PLAIN, greedy, llama_cpp, top_k};
use crate::models::{extended, fixture};

const N_GENERATED: usize = 64;

/// A file `MODEL.PROMPT.json` or `MODEL.CHANGE.PROMPT.json`.
#[derive(Serialize, Deserialize)]
struct Reference {
    engine: String,
    model: String,
    /// Header keys with another value than in the model's file.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    overrides: BTreeMap<String, serde_json::Value>,
    /// Additional F32 vectors.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    tensors: BTreeMap<String, Vec<f32>>,
    prompt: String,
    prompt_tokens: Vec<u32>,
    generated_tokens: Vec<u32>,
    text: String,
    /// The five highest logits before each generated token.
    top5_logits_per_generated_position: Vec<Vec<(u32, f32)>>,
    /// Expert ids by MoE layer, token and slot.
    expert_ids_by_layer: Vec<Vec<Vec<i32>>>,
}

impl Reference {
    /// Replaces the results with those of a greedy generation.
    fn renew(&mut self, gguf: &Gguf) {
        let model = Model::load(gguf).unwrap();
        self.prompt_tokens = model.tokenize(&self.prompt, true, true).unwrap();
        let (tokens, answer) = greedy(&model, gguf, &self.prompt_tokens, N_GENERATED);
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|&token| model.piece(token))
            .collect();
        let text = String::from_utf8_lossy(&bytes);
        // SentencePiece adds a space before the first word.
        let is_sentencepiece =
            gguf.metadata().str("tokenizer.ggml.model").unwrap() == Some("llama");
        self.text = match text.strip_prefix(' ') {
            Some(rest) if is_sentencepiece => rest.to_owned(),
            _ => text.into_owned(),
        };
        self.generated_tokens = tokens;
        let top5 = answer.logits.iter().take(N_GENERATED).map(|logits| {
            let ids = top_k(logits, 5).into_iter();
            ids.map(|id| (id, logits[id as usize])).collect()
        });
        self.top5_logits_per_generated_position = top5.collect();
        self.expert_ids_by_layer = experts(&answer).into_values().collect();
    }

    /// Prints the distances of llama.cpp with flash attention and with an F16 KV cache from the plain variant.
    fn print_spread(&self, name: &str, gguf: &Gguf) {
        let tokens = [&*self.prompt_tokens, &self.generated_tokens].concat();
        let variants = [PLAIN, OTHERS[0], OTHERS[1], OTHERS[2]];
        let answers = llama_cpp(gguf, &tokens, &[self.prompt_tokens.len()], variants);
        for (variant, other) in OTHERS.iter().zip(&answers[1..]) {
            println!("{name}: {variant:?}: {}", Distance::of(&answers[0], other));
        }
    }

    /// Asserts that llama.cpp computes the same results for the same tokens.
    fn check(&self, name: &str, gguf: &Gguf, bounds: &Bounds) {
        let model = Model::load(gguf).unwrap();
        let prompt_tokens = model.tokenize(&self.prompt, true, true).unwrap();
        assert_eq!(prompt_tokens, self.prompt_tokens, "{name}");
        let tokens = [&*self.prompt_tokens, &self.generated_tokens].concat();
        let [plain] = llama_cpp(gguf, &tokens, &[prompt_tokens.len()], [PLAIN]);

        let (mut other_top1, mut difference) = (0, 0.0);
        let positions = self.top5_logits_per_generated_position.iter();
        for (top5, logits) in positions.zip(&plain.logits) {
            other_top1 += usize::from(top_k(logits, 1)[0] != top5[0].0);
            let apart = top5
                .iter()
                .map(|&(id, logit)| (logits[id as usize] - logit).abs());
            difference += f64::from(apart.sum::<f32>()) / (5 * N_GENERATED) as f64;
        }
        assert!(
            other_top1 <= bounds.other_top1,
            "{name}: {other_top1} other best tokens"
        );
        assert!(
            difference <= bounds.difference,
            "{name}: logits differ by {difference}"
        );

        let layers = experts(&plain);
        assert_eq!(layers.len(), self.expert_ids_by_layer.len(), "{name}");
        let (mut n_rows, mut other_experts) = (0, 0);
        for (theirs, reference) in layers.values().zip(&self.expert_ids_by_layer) {
            assert_eq!(theirs.len(), reference.len(), "{name}: tokens of a layer");
            n_rows += theirs.len();
            let set = |ids: &[i32]| ids.iter().copied().collect::<BTreeSet<_>>();
            let rows = theirs.iter().zip(reference);
            other_experts += rows.filter(|(a, b)| set(a) != set(b)).count();
        }
        let share = other_experts as f64 / n_rows as f64;
        assert!(
            share <= bounds.other_experts,
            "{name}: {other_experts} of {n_rows} sets of experts"
        );
    }
}

/// Expert ids by layer, then by position.
fn experts(answer: &Answer) -> BTreeMap<usize, Vec<Vec<i32>>> {
    let mut layers: BTreeMap<usize, Vec<Vec<i32>>> = BTreeMap::new();
    for ((layer, _), row) in &answer.rows {
        layers.entry(*layer).or_default().push(row.ids.clone());
    }
    layers
}

/// Maximum distance between the results on two CPUs.
struct Bounds {
    /// Number of positions with another best token.
    other_top1: usize,
    /// Mean difference of the five highest logits.
    difference: f64,
    /// Fraction of routed tokens with another set of experts.
    other_experts: f64,
}

const F16: Bounds = Bounds {
    other_top1: 1,
    difference: 0.02,
    other_experts: 0.01,
};
/// Maximum distances between variants of llama.cpp (`fixtures/README.md`).
const QUANTIZED: Bounds = Bounds {
    other_top1: 3,
    difference: 0.10,
    other_experts: 0.029,
};

/// Checks or writes all references whose name starts with `prefix`; returns their number.
fn check_or_bless(prefix: &str, bounds: &Bounds) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let bless = std::env::var_os("MOE_BLESS").is_some_and(|bless| bless == "1");
    let mut names = moe_testkit::reference::names();
    names.retain(|name| name.starts_with(prefix));
    for name in &names {
        let json = moe_testkit::reference::read(name);
        let mut reference: Reference = serde_json::from_slice(&json).unwrap();
        let keys: Vec<(&str, Value)> = reference
            .overrides
            .iter()
            .map(|(key, value)| (key.as_str(), gguf_value(value)))
            .collect();
        let model = reference.model.strip_suffix(".gguf").unwrap();
        let path = if keys.is_empty() && reference.tensors.is_empty() {
            fixture(&reference.model)
        } else {
            extended(dir.path(), model, &keys, &reference.tensors)
        };
        let gguf = Gguf::open(&path).unwrap();
        if bless {
            reference.renew(&gguf);
            reference.print_spread(name, &gguf);
            moe_testkit::reference::write(name, &serde_json::to_vec(&reference).unwrap());
        } else {
            reference.check(name, &gguf, bounds);
        }
    }
    names.len()
}

fn gguf_value(value: &serde_json::Value) -> Value {
    match (value.as_str(), value.as_u64(), value.as_f64()) {
        (Some(text), ..) => Value::String(text.to_owned()),
        (_, Some(n), _) => Value::U32(u32::try_from(n).unwrap()),
        (_, _, Some(x)) => Value::F32(x as f32),
        _ => panic!("{value} is not a value of a key"),
    }
}

#[test]
fn random_models_reproduce_references() {
    assert_eq!(check_or_bless("random-", &F16), 32);
}

#[test]
fn trained_models_reproduce_references() {
    assert_eq!(check_or_bless("tiny-", &QUANTIZED), 8);
}
