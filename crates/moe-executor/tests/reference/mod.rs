//! What llama.cpp did with the fixtures, and how far this executor is from it when it is fed the same tokens.
#![allow(dead_code)] // Not every test uses all of it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Device;
use moe_executor::generate::Decode;
use moe_executor::recorder::Recorder;
use moe_executor::session::Logits;
use moe_executor::{Model, Session};
use moe_gguf::Gguf;
use moe_trace::record::{PHASE_GENERATE, PHASE_PROMPT};
use serde::Deserialize;

#[derive(Deserialize)]
pub struct Reference {
    pub prompt: String,
    pub prompt_tokens: Vec<u32>,
    pub generated_tokens: Vec<u32>,
    pub text: String,
    pub top5_logits_per_generated_position: Vec<Vec<(u32, f32)>>,
    /// layer with experts, row, slot
    pub expert_ids_by_layer: Vec<Vec<Vec<i32>>>,
    /// Keys that llama.cpp was told to read instead of the file's.
    #[serde(default)]
    pub overrides: BTreeMap<String, serde_json::Value>,
    /// F32 vectors that the file had in addition.
    #[serde(default)]
    pub tensors: BTreeMap<String, Vec<f32>>,
}

/// How far a model may stray from llama.cpp.
pub struct Bounds {
    pub top1_of_64: usize,
    pub mean_difference: f64,
    pub same_experts: f64,
    pub near_tie: f32,
}

pub const F16: Bounds = Bounds {
    top1_of_64: 63,
    mean_difference: 0.02,
    same_experts: 0.99,
    near_tie: 0.05,
};
pub const QUANTIZED: Bounds = Bounds {
    top1_of_64: 60,
    mean_difference: 0.13,
    same_experts: 0.96,
    near_tie: 0.5,
};

pub const PROMPTS: [&str; 4] = ["kernel", "python", "dictionary", "long"];

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// One row that a layer routed.
pub struct Row {
    pub position: u32,
    pub ids: Vec<i32>,
    pub logits: Vec<f32>,
}

/// Makes the GPU that a session is to use.
pub type Open<'o> = &'o dyn for<'g> Fn(&'g Gguf, &Model<'g>) -> Option<Device<'g>>;

/// The host alone.
pub fn host<'g>(_: &'g Gguf, _: &Model<'g>) -> Option<Device<'g>> {
    None
}

/// Feeds the reference's tokens and returns the logits before each generated token, and every routed row by layer.
pub fn run(
    model: &Model,
    reference: &Reference,
    batch: usize,
    open: Open,
) -> (Vec<Vec<f32>>, Vec<Vec<Row>>) {
    let threads = Threads::new(2).unwrap();
    let device = open(model.gguf(), model);
    let recorder = Recorder::new(None);
    let mut session = Session::with_device(model, &threads, device, recorder, 1024);
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

pub fn reference(name: &str) -> Reference {
    let path = fixtures().join(format!("reference/{name}.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// How far this executor is from llama.cpp.
#[derive(Clone, Copy, Default)]
pub struct Distance {
    /// Positions with logits, and those at which the best token is the same.
    positions: usize,
    same_top1: usize,
    /// Sum of the differences of the five best logits.
    difference: f64,
    /// Rows that were routed, and those with the same set of experts.
    rows: usize,
    same_experts: usize,
    /// How far experts that were swapped lie apart in what they are chosen by.
    widest_tie: f32,
}

impl Distance {
    /// Both together: a near tie that falls the other way carries on through the text that follows it.
    pub fn and(self, other: Distance) -> Distance {
        Distance {
            positions: self.positions + other.positions,
            same_top1: self.same_top1 + other.same_top1,
            difference: self.difference + other.difference,
            rows: self.rows + other.rows,
            same_experts: self.same_experts + other.same_experts,
            widest_tie: self.widest_tie.max(other.widest_tie),
        }
    }

    fn mean_difference(&self) -> f64 {
        self.difference / (5 * self.positions) as f64
    }

    fn share_of_experts(&self) -> f64 {
        self.same_experts as f64 / self.rows as f64
    }

    /// Whether it lies within the bounds.
    pub fn is_within(&self, bounds: &Bounds) -> bool {
        self.same_top1 * 64 >= bounds.top1_of_64 * self.positions
            && self.mean_difference() <= bounds.mean_difference
            && self.share_of_experts() >= bounds.same_experts
            && self.widest_tie < bounds.near_tie
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "top-1 {}/{}, mean |Δ| {:.4}, same experts {:.2} %, widest tie {:.4}",
            self.same_top1,
            self.positions,
            self.mean_difference(),
            self.share_of_experts() * 100.0,
            self.widest_tie
        )
    }
}

/// Runs a model over `reference/STEM.PROMPT.json`; gives the distance for each prompt.
pub fn distances(gguf: &Gguf, file: &str, prompts: &[&str], open: Open) -> Vec<Distance> {
    let model = Model::load(gguf).unwrap();
    let mut distances = Vec::new();
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

        let (logits, routed) = run(&model, &reference, 512, open);
        let mut distance = Distance::default();
        let positions = reference
            .top5_logits_per_generated_position
            .iter()
            .zip(&logits);
        for (top5, ours) in positions {
            distance.positions += 1;
            distance.same_top1 += usize::from(top1(ours) == top5[0].0);
            let apart = |(id, logit): &(u32, f32)| f64::from((ours[*id as usize] - logit).abs());
            distance.difference += top5.iter().map(apart).sum::<f64>();
        }
        let routed: Vec<(usize, &Vec<Row>)> = (0..)
            .zip(&routed)
            .filter(|(_, rows)| !rows.is_empty())
            .collect();
        assert_eq!(reference.expert_ids_by_layer.len(), routed.len());
        for (theirs, (il, ours)) in reference.expert_ids_by_layer.iter().zip(routed) {
            // equal row counts also say that the prompt is cut in the last layer where llama.cpp cuts it
            assert_eq!(
                theirs.len(),
                ours.len(),
                "{file} {prompt}: rows routed in a layer"
            );
            let bias = selection_bias(gguf, il);
            for (theirs, ours) in theirs.iter().zip(ours) {
                distance.rows += 1;
                let tie = tie(theirs, ours, bias.as_deref());
                distance.same_experts += usize::from(tie.is_none());
                distance.widest_tie = distance.widest_tie.max(tie.unwrap_or(0.0));
            }
        }
        println!("{file} {prompt}: {distance}");
        distances.push(distance);
    }
    distances
}

/// How far the experts that were swapped lie apart in what they are chosen by; none if the sets are the same.
fn tie(theirs: &[i32], ours: &Row, bias: Option<&[f32]>) -> Option<f32> {
    let a: BTreeSet<i32> = theirs.iter().copied().collect();
    let b: BTreeSet<i32> = ours.ids.iter().copied().collect();
    let chosen_by = |&expert: &i32| {
        let logit = ours.logits[expert as usize];
        bias.map_or(logit, |bias| {
            1.0 / (1.0 + (-logit).exp()) + bias[expert as usize]
        })
    };
    let lost = a.difference(&b).map(chosen_by);
    let won = b.difference(&a).map(chosen_by);
    let apart = won.fold(f32::NEG_INFINITY, f32::max) - lost.fold(f32::INFINITY, f32::min);
    (a != b).then_some(apart)
}

/// What a layer adds to its probabilities for the choice, if it does.
fn selection_bias(gguf: &Gguf, il: usize) -> Option<Vec<f32>> {
    let tensor = gguf.tensor(&format!("blk.{il}.exp_probs_b.bias"))?;
    let (values, rest) = gguf.data(tensor).unwrap().as_chunks();
    assert!(rest.is_empty());
    Some(values.iter().map(|&v| f32::from_le_bytes(v)).collect())
}
