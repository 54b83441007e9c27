//! What llama.cpp did with the fixtures, held against this executor fed the same tokens.
//!
//! The bounds come from llama.cpp's own spread, told in `fixtures/README.md`: on an F16 model rounding hardly matters;
//! on a quantized one the rounding of activations makes near ties fall either way.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use moe_executor::cpu::threads::Threads;
use moe_executor::generate::Decode;
use moe_executor::recorder::Recorder;
use moe_executor::session::Logits;
use moe_executor::{Model, Session};
use moe_gguf::{GgmlType, Gguf, Value, write};
use moe_trace::record::{PHASE_GENERATE, PHASE_PROMPT};
use serde::Deserialize;

#[derive(Deserialize)]
struct Reference {
    prompt: String,
    prompt_tokens: Vec<u32>,
    generated_tokens: Vec<u32>,
    text: String,
    top5_logits_per_generated_position: Vec<Vec<(u32, f32)>>,
    /// layer with experts, row, slot
    expert_ids_by_layer: Vec<Vec<Vec<i32>>>,
    /// Keys that llama.cpp was told to read instead of the file's.
    #[serde(default)]
    overrides: BTreeMap<String, serde_json::Value>,
    /// F32 vectors that the file had in addition.
    #[serde(default)]
    tensors: BTreeMap<String, Vec<f32>>,
}

/// How far a model may stray from llama.cpp.
struct Bounds {
    top1_of_64: usize,
    mean_difference: f64,
    same_experts: f64,
    near_tie: f32,
}

const F16: Bounds = Bounds {
    top1_of_64: 63,
    mean_difference: 0.02,
    same_experts: 0.99,
    near_tie: 0.05,
};
const QUANTIZED: Bounds = Bounds {
    top1_of_64: 60,
    mean_difference: 0.13,
    same_experts: 0.96,
    near_tie: 0.5,
};

const PROMPTS: [&str; 4] = ["kernel", "python", "dictionary", "long"];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// One row that a layer routed.
struct Row {
    position: u32,
    ids: Vec<i32>,
    logits: Vec<f32>,
}

/// Feeds the reference's tokens and returns the logits before each generated token, and every routed row by layer.
fn run(model: &Model, reference: &Reference, batch: usize) -> (Vec<Vec<f32>>, Vec<Vec<Row>>) {
    let threads = Threads::new(2).unwrap();
    let mut session = Session::new(model, &threads, Recorder::new(None), 1024);
    let routed: Rc<RefCell<Vec<Vec<Row>>>> = Rc::new(RefCell::new(
        (0..model.hparams().n_layer).map(|_| Vec::new()).collect(),
    ));
    let seen = routed.clone();
    session.observe(Box::new(move |routed| {
        let k = routed.routing.n_expert_used;
        let n_expert = routed.logits.len() / routed.positions.len();
        for (row, &position) in routed.positions.iter().enumerate() {
            seen.borrow_mut()[routed.layer].push(Row {
                position,
                ids: routed.routing.ids.host()[row * k..][..k].to_vec(),
                logits: routed.logits[row * n_expert..][..n_expert].to_vec(),
            });
        }
    }));
    let mut logits = Vec::new();
    let batches: Vec<&[u32]> = reference.prompt_tokens.chunks(batch).collect();
    for (i, tokens) in batches.iter().enumerate() {
        let last = i + 1 == batches.len();
        let wanted = if last { Logits::Last } else { Logits::None };
        let out = session.decode(tokens, PHASE_PROMPT, wanted).unwrap();
        if last {
            logits.push(out.to_vec());
        }
    }
    for &token in &reference.generated_tokens {
        logits.push(
            session
                .decode(&[token], PHASE_GENERATE, Logits::Last)
                .unwrap()
                .to_vec(),
        );
    }
    drop(session);
    let routed = Rc::try_unwrap(routed)
        .ok()
        .expect("the session is gone")
        .into_inner();
    (logits, routed)
}

fn top1(logits: &[f32]) -> u32 {
    let best = logits
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.unwrap().0 as u32
}

fn reference(name: &str) -> Reference {
    let path = fixtures().join(format!("reference/{name}.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn compare(file: &str, bounds: &Bounds) {
    let gguf = Gguf::open(fixtures().join(file)).unwrap();
    let stem = file.trim_end_matches(".gguf");
    compare_with(&gguf, stem, &PROMPTS, bounds);
}

/// Holds a model against `reference/STEM.PROMPT.json`.
fn compare_with(gguf: &Gguf, file: &str, prompts: &[&str], bounds: &Bounds) {
    let model = Model::load(gguf).unwrap();
    for prompt in prompts {
        let reference = reference(&format!("{file}.{prompt}"));
        let tokenizer = model.tokenizer();
        assert_eq!(
            tokenizer.encode(&reference.prompt, true, true).unwrap(),
            reference.prompt_tokens,
            "{prompt}"
        );
        assert_eq!(
            tokenizer.decode(&reference.generated_tokens),
            reference.text,
            "{prompt}"
        );

        let (logits, routed) = run(&model, &reference, 512);
        let positions = reference
            .top5_logits_per_generated_position
            .iter()
            .zip(&logits);
        let (mut same_top1, mut difference, mut n) = (0, 0.0, 0);
        for (top5, ours) in positions {
            same_top1 += usize::from(top1(ours) == top5[0].0);
            for (id, logit) in top5 {
                difference += f64::from((ours[*id as usize] - logit).abs());
                n += 1;
            }
        }
        let mean = difference / f64::from(n);

        let (mut same, mut rows, mut widest_tie) = (0, 0, 0.0f32);
        let routed: Vec<&Vec<Row>> = routed.iter().filter(|rows| !rows.is_empty()).collect();
        assert_eq!(reference.expert_ids_by_layer.len(), routed.len());
        for (theirs, ours) in reference.expert_ids_by_layer.iter().zip(routed) {
            // equal row counts also say that the prompt is cut in the last layer where llama.cpp cuts it
            assert_eq!(
                theirs.len(),
                ours.len(),
                "{file} {prompt}: rows routed in a layer"
            );
            for (theirs, ours) in theirs.iter().zip(ours) {
                let a: BTreeSet<i32> = theirs.iter().copied().collect();
                let b: BTreeSet<i32> = ours.ids.iter().copied().collect();
                rows += 1;
                same += usize::from(a == b);
                let lost = a
                    .difference(&b)
                    .map(|&e| ours.logits[e as usize])
                    .fold(f32::INFINITY, f32::min);
                let won = b
                    .difference(&a)
                    .map(|&e| ours.logits[e as usize])
                    .fold(f32::NEG_INFINITY, f32::max);
                if a != b {
                    widest_tie = widest_tie.max(won - lost);
                }
            }
        }
        let share = f64::from(same as u32) / f64::from(rows as u32);
        println!(
            "{file} {prompt}: top-1 {same_top1}/64, mean |Δ| {mean:.4}, same experts {:.2} %, widest tie {widest_tie:.3}",
            share * 100.0
        );
        assert!(
            same_top1 >= bounds.top1_of_64,
            "{file} {prompt}: top-1 equal at {same_top1} of 64"
        );
        assert!(
            mean <= bounds.mean_difference,
            "{file} {prompt}: mean difference {mean}"
        );
        assert!(
            share >= bounds.same_experts,
            "{file} {prompt}: same experts {share}"
        );
        assert!(
            widest_tie < bounds.near_tie,
            "{file} {prompt}: swapped experts {widest_tie} apart"
        );
    }
}

#[test]
fn random_qwen3moe_f16() {
    compare("random-qwen3moe-F16.gguf", &F16);
}

#[test]
fn random_llama_f16() {
    compare("random-llama-F16.gguf", &F16);
}

#[test]
fn random_qwen2moe_f16() {
    compare("random-qwen2moe-F16.gguf", &F16);
}

#[test]
fn random_olmoe_f16() {
    compare("random-olmoe-F16.gguf", &F16);
}

#[test]
fn random_dots1_f16() {
    compare("random-dots1-F16.gguf", &F16);
}

#[test]
fn random_gpt_oss_f16() {
    compare("random-gpt-oss-F16.gguf", &F16);
}

#[test]
fn tiny_qwen3moe_q4_k_m() {
    compare("tiny-qwen3moe-Q4_K_M.gguf", &QUANTIZED);
}

#[test]
fn tiny_gpt_oss_mxfp4() {
    compare("tiny-gpt-oss-MXFP4.gguf", &QUANTIZED);
}

/// The model of a fixture with the keys and tensors of a reference added.
fn changed(file: &str, reference: &Reference) -> Gguf {
    let gguf = Gguf::open(fixtures().join(file)).unwrap();
    let overridden = |key: &str| reference.overrides.contains_key(key);
    let mut header = write::Header::like(&gguf, overridden).unwrap();
    for (key, value) in &reference.overrides {
        let value = match (value.as_str(), value.as_u64(), value.as_f64()) {
            (Some(text), ..) => Value::String(text.to_owned()),
            (_, Some(n), _) => Value::U32(n as u32),
            (_, _, Some(x)) => Value::F32(x as f32),
            _ => panic!("{key} is {value}"),
        };
        header.set(key, &value).unwrap();
    }
    for t in gguf.tensors() {
        header
            .tensor(&t.name, t.ty, &t.ne[..t.n_dims as usize])
            .unwrap();
    }
    for (name, values) in &reference.tensors {
        header
            .tensor(name, GgmlType::F32, &[values.len() as u64])
            .unwrap();
    }
    let mut writer = write::Writer::new(Vec::new(), header).unwrap();
    for t in gguf.tensors() {
        writer.write(gguf.data(t).unwrap()).unwrap();
    }
    for value in reference.tensors.values().flatten() {
        writer.write(&value.to_le_bytes()).unwrap();
    }
    Gguf::from_bytes(file, writer.finish().unwrap()).unwrap()
}

/// What a header can ask for and no fixture does: scaled rotations, divisors of their frequencies, groups of experts.
#[test]
fn keys_that_change_a_model() {
    for (model, change, prompts) in [
        ("random-gpt-oss-F16", "yarn", &["python", "long"][..]),
        ("random-gpt-oss-F16", "yarn-attn", &["python"]),
        ("random-llama-F16", "linear", &["python"]),
        ("random-llama-F16", "factors", &["python"]),
        ("random-dots1-F16", "groups", &["python", "long"]),
        ("random-olmoe-F16", "groups", &["python"]),
    ] {
        let stem = format!("{model}.{change}");
        let first = reference(&format!("{stem}.{}", prompts[0]));
        assert!(!(first.overrides.is_empty() && first.tensors.is_empty()));
        let gguf = changed(&format!("{model}.gguf"), &first);
        compare_with(&gguf, &stem, prompts, &F16);
    }
}

#[test]
fn a_tensor_that_would_be_left_out_is_refused() {
    let mut reference = reference("random-llama-F16.factors.python");
    let factors = reference.tensors.remove("rope_freqs.weight").unwrap();
    let name = "blk.1.attn_q.scale";
    reference.tensors.insert(name.into(), factors);
    let gguf = changed("random-llama-F16.gguf", &reference);
    let error = Model::load(&gguf).err().unwrap().to_string();
    assert!(
        error.contains(name) && error.contains("not known in llama models"),
        "{error}"
    );
}

#[test]
fn an_unknown_architecture_names_the_known_ones() {
    let mut reference = reference("random-llama-F16.kernel");
    reference
        .overrides
        .insert("general.architecture".into(), "bert".into());
    let gguf = changed("random-llama-F16.gguf", &reference);
    let error = Model::load(&gguf).err().unwrap().to_string();
    assert!(
        error.ends_with("`bert` is not supported; this executor runs dots1, gpt-oss, llama, olmoe, qwen2moe, qwen3moe"),
        "{error}"
    );
}

/// A prompt cut into small batches gives the same result as in one, and routes the last layer of qwen3moe only where
/// logits are wanted.
#[test]
fn batches_do_not_change_the_result() {
    let reference = reference("random-qwen3moe-F16.long");
    let gguf = Gguf::open(fixtures().join("random-qwen3moe-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let (whole, _) = run(&model, &reference, 512);
    let (cut, routed) = run(&model, &reference, 100);
    for (a, b) in whole.iter().flatten().zip(cut.iter().flatten()) {
        assert!((a - b).abs() < 1e-3, "{a} {b}");
    }
    let last = routed.last().unwrap();
    assert_eq!(last.len(), 65);
    assert_eq!(last[0].position, 461);
    assert_eq!(routed[0].len(), 526);
}
