//! Reference results of llama.cpp for the fixtures, and the distance of the executor's results for the same tokens.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;

use moe_engine::{Decode, Logits};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Devices, Model, Session};
use moe_gguf::Gguf;
use moe_trace::Phase;
use serde::Deserialize;

#[derive(Deserialize)]
pub struct Reference {
    pub prompt: String,
    pub prompt_tokens: Vec<u32>,
    pub generated_tokens: Vec<u32>,
    pub text: String,
    pub top5_logits_per_generated_position: Vec<Vec<(u32, f32)>>,
    /// Selected experts `(MoE layer, token, slot)`.
    pub expert_ids_by_layer: Vec<Vec<Vec<i32>>>,
    /// Metadata keys that were overridden in llama.cpp.
    #[serde(default)]
    pub overrides: BTreeMap<String, serde_json::Value>,
    /// F32 vectors that were added to the file.
    #[serde(default)]
    pub tensors: BTreeMap<String, Vec<f32>>,
}

/// Maximum distance of a model from llama.cpp.
pub struct Bounds {
    /// Fraction of the positions with another best token.
    other_top1: f64,
    /// Mean difference of the five best logits.
    mean_difference: f64,
    /// Fraction of the routed tokens with another set of experts.
    other_experts: f64,
    /// Difference of the selection scores of swapped experts.
    near_tie: f32,
}

pub const F16: Bounds = Bounds {
    other_top1: 1.0 / 64.0,
    mean_difference: 0.02,
    other_experts: 0.01,
    near_tie: 0.05,
};
/// 1.25 times the maximum distance between builds of llama.cpp (`fixtures/README.md`): the same best token at 63 to 65 of 65
/// positions, mean difference of logits 0.06 to 0.10, the same experts for 97.1 to 98.8 % of the routed tokens. The bound on
/// ties is not measured.
pub const QWEN3MOE: Bounds = Bounds {
    other_top1: 1.25 * 2.0 / 65.0,
    mean_difference: 1.25 * 0.10,
    other_experts: 1.25 * 0.029,
    near_tie: 0.5,
};
/// Like [`QWEN3MOE`], with 62 to 65 of 65 positions, 0.04 to 0.06, 97.5 to 98.5 %.
pub const GPT_OSS: Bounds = Bounds {
    other_top1: 1.25 * 3.0 / 65.0,
    mean_difference: 1.25 * 0.06,
    other_experts: 1.25 * 0.025,
    near_tie: 0.5,
};

pub const PROMPTS: [&str; 4] = ["kernel", "python", "dictionary", "long"];

/// A routed token.
pub struct Row {
    pub position: u32,
    pub ids: Vec<i32>,
    pub logits: Vec<f32>,
}

/// Opens the devices of a session.
pub type Open<'o> = &'o dyn for<'g> Fn(&'g Gguf, &Model<'g>) -> Devices<'g>;

/// Prepares a session before the first token.
pub type Prepare<'p> = &'p dyn Fn(&mut Session);

/// A session as it is.
pub fn as_is(_: &mut Session) {}

/// Checks the devices after all tokens; returns a description of a fault.
pub type Look<'l> = &'l dyn Fn(&Devices) -> Option<String>;

/// The CPU without GPUs.
pub fn host<'g>(_: &'g Gguf, _: &Model<'g>) -> Devices<'g> {
    Devices::cpu()
}

/// The results of a run with the tokens of a reference.
pub struct ModelRun {
    /// The logits before each generated token.
    pub logits: Vec<Vec<f32>>,
    /// Routed tokens by layer.
    pub routed: Vec<Vec<Row>>,
    /// Fault of the devices.
    pub wrong: Option<String>,
}

/// Evaluates the tokens of a reference, the prompt in batches of `batch` tokens.
pub fn run(
    model: &Model,
    reference: &Reference,
    batch: usize,
    (open, prepare): (Open, Prepare),
    look: Look,
) -> ModelRun {
    let threads = Threads::new(2).unwrap();
    let devices = open(model.gguf(), model);
    let recorder = Recorder::new(None);
    let mut session = Session::with_devices(
        model,
        &threads,
        devices,
        recorder,
        CacheParams::of_type(CacheType::F32, 1024),
    )
    .unwrap();
    prepare(&mut session);
    let routed: Rc<RefCell<Vec<Vec<Row>>>> = Rc::new(RefCell::new(
        (0..model.hparams().n_layer).map(|_| Vec::new()).collect(),
    ));
    let seen = routed.clone();
    session.observe(Box::new(move |routed| {
        let k = routed.n_expert_used;
        let n_expert = routed.logits.len() / routed.positions.len();
        for (row, &position) in routed.positions.iter().enumerate() {
            seen.borrow_mut()[routed.layer.index()].push(Row {
                position,
                ids: routed.ids[row * k..][..k].to_vec(),
                logits: routed.logits[row * n_expert..][..n_expert].to_vec(),
            });
        }
    }));
    let mut logits = Vec::new();
    let batches: Vec<&[u32]> = reference.prompt_tokens.chunks(batch).collect();
    for (i, tokens) in batches.iter().enumerate() {
        let last = i + 1 == batches.len();
        let wanted = if last { Logits::Last } else { Logits::None };
        let out = session.decode(tokens, Phase::Prompt, wanted).unwrap();
        if last {
            logits.push(out.to_vec());
        }
    }
    for &token in &reference.generated_tokens {
        logits.push(
            session
                .decode(&[token], Phase::Generate, Logits::Last)
                .unwrap()
                .to_vec(),
        );
    }
    let wrong = look(session.devices());
    drop(session);
    let routed = Rc::try_unwrap(routed)
        .ok()
        .expect("the session is gone")
        .into_inner();
    ModelRun {
        logits,
        routed,
        wrong,
    }
}

fn top1(logits: &[f32]) -> u32 {
    let best = logits
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.unwrap().0 as u32
}

pub fn reference(name: &str) -> Reference {
    serde_json::from_slice(&moe_testkit::reference::read(name)).unwrap()
}

/// The distance of the executor's results from llama.cpp's.
#[derive(Clone, Copy, Default)]
pub struct Distance {
    /// Positions with logits.
    positions: usize,
    /// Positions with the same best token.
    same_top1: usize,
    /// Sum of the differences of the five best logits.
    difference: f64,
    /// Routed tokens.
    rows: usize,
    /// Routed tokens with the same set of experts.
    same_experts: usize,
    /// Maximum difference of the selection scores of swapped experts.
    widest_tie: f32,
}

impl Distance {
    /// The distance over both.
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
        self.difference / (5 * self.positions).max(1) as f64
    }

    /// Whether the distance is within the bounds.
    pub fn is_within(&self, bounds: &Bounds) -> bool {
        let other_top1 = self.positions - self.same_top1;
        let other_experts = self.rows - self.same_experts;
        other_top1 as f64 <= bounds.other_top1 * self.positions as f64
            && self.mean_difference() <= bounds.mean_difference
            && other_experts as f64 <= bounds.other_experts * self.rows as f64
            && self.has_near_ties(bounds)
    }

    /// Whether all swapped experts have similar selection scores.
    pub fn has_near_ties(&self, bounds: &Bounds) -> bool {
        self.widest_tie < bounds.near_tie
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
            self.same_experts as f64 / self.rows.max(1) as f64 * 100.0,
            self.widest_tie
        )
    }
}

/// The distance over one prompt and its generated tokens.
pub struct PromptDistance {
    pub all: Distance,
    /// The distance before the first token for which a layer selects other experts. Later tokens depend on its keys and values.
    pub before_other_experts: Distance,
    /// The position of that token; `None` if all experts are the same.
    pub other_experts_at: Option<u32>,
    /// Fault of the devices.
    pub wrong: Option<String>,
}

/// Runs a model over `reference/FILE.PROMPT.json`. Returns the distance for each prompt.
pub fn distances(
    gguf: &Gguf,
    file: &str,
    prompts: &[&str],
    (open, prepare): (Open, Prepare),
    look: Look,
) -> Vec<PromptDistance> {
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

        let ran = run(&model, &reference, 512, (open, prepare), look);
        let of_prompt = compare(gguf, &reference, &ran, &format!("{file} {prompt}"));
        println!("{file} {prompt}: {}", of_prompt.all);
        distances.push(of_prompt);
    }
    distances
}

fn compare(gguf: &Gguf, reference: &Reference, ran: &ModelRun, what: &str) -> PromptDistance {
    let routed = (0..).zip(&ran.routed).filter(|(_, rows)| !rows.is_empty());
    let routed: Vec<(usize, &Vec<Row>)> = routed.collect();
    assert_eq!(reference.expert_ids_by_layer.len(), routed.len(), "{what}");
    // Position, and the difference of the selection scores of swapped experts.
    let mut rows: Vec<(u32, Option<f32>)> = Vec::new();
    for (theirs, (il, ours)) in reference.expert_ids_by_layer.iter().zip(routed) {
        // Equal counts also show that the output rows are selected where llama.cpp selects them.
        assert_eq!(theirs.len(), ours.len(), "{what}: rows routed in a layer");
        let bias = selection_bias(gguf, il);
        let row =
            |(theirs, ours): (&Vec<i32>, &Row)| (ours.position, tie(theirs, ours, bias.as_deref()));
        rows.extend(theirs.iter().zip(ours).map(row));
    }
    // The first logits are those of the last token of the prompt.
    let first = reference.prompt_tokens.len() as u32 - 1;
    let top5 = reference.top5_logits_per_generated_position.iter();
    let logits: Vec<_> = (first..).zip(top5.zip(&ran.logits)).collect();
    let before = |end: u32| {
        let mut distance = Distance::default();
        for (_, (top5, ours)) in logits.iter().filter(|(at, _)| *at < end) {
            distance.positions += 1;
            distance.same_top1 += usize::from(top1(ours) == top5[0].0);
            let apart = |(id, logit): &(u32, f32)| f64::from((ours[*id as usize] - logit).abs());
            distance.difference += top5.iter().map(apart).sum::<f64>();
        }
        for (_, tie) in rows.iter().filter(|(at, _)| *at < end) {
            distance.rows += 1;
            distance.same_experts += usize::from(tie.is_none());
            distance.widest_tie = distance.widest_tie.max(tie.unwrap_or(0.0));
        }
        distance
    };
    let others = rows.iter().filter(|(_, tie)| tie.is_some());
    let other_experts_at = others.map(|(at, _)| *at).min();
    PromptDistance {
        all: before(u32::MAX),
        before_other_experts: before(other_experts_at.unwrap_or(u32::MAX)),
        other_experts_at,
        wrong: ran.wrong.clone(),
    }
}

/// The difference of the selection scores of swapped experts; `None` if the sets are the same.
fn tie(theirs: &[i32], ours: &Row, bias: Option<&[f32]>) -> Option<f32> {
    let a: BTreeSet<i32> = theirs.iter().copied().collect();
    let b: BTreeSet<i32> = ours.ids.iter().copied().collect();
    let score = |&expert: &i32| {
        let logit = ours.logits[expert as usize];
        bias.map_or(logit, |bias| {
            1.0 / (1.0 + (-logit).exp()) + bias[expert as usize]
        })
    };
    let lost = a.difference(&b).map(score);
    let won = b.difference(&a).map(score);
    let apart = won.fold(f32::NEG_INFINITY, f32::max) - lost.fold(f32::INFINITY, f32::min);
    (a != b).then_some(apart)
}

/// The bias that a layer adds to its probabilities before the selection, if it has one.
fn selection_bias(gguf: &Gguf, il: usize) -> Option<Vec<f32>> {
    let tensor = gguf.tensor(&format!("blk.{il}.exp_probs_b.bias"))?;
    let (values, rest) = gguf.data(tensor).unwrap().as_chunks();
    assert!(rest.is_empty());
    Some(values.iter().map(|&v| f32::from_le_bytes(v)).collect())
}
