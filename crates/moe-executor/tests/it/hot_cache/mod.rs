//! The hot cache with lanes in CPU memory: results, counters, records and exchanges.

mod counters;
pub mod dynamic;
mod exchanges;
mod plans;
mod results;
pub mod synthetic;

pub use synthetic::{ARCHITECTURES, random_plan, synthetic};

use std::collections::{BTreeMap, BTreeSet};

use moe_engine::{Decode, Logits};
use moe_executor::Session;
use moe_executor::hot_cache::LaneContents;
use moe_executor::{DeviceId, Model};
use moe_gguf::{ExpertId, Gguf, LayerId};
use moe_placement::random::SplitMix64;
use moe_testkit::fixture;
use moe_trace::Phase;

/// With and without biases, shared experts, dense layers and expert groups; F16 and quantized.
const MODELS: [&str; 8] = [
    "random-qwen3moe-F16.gguf",
    "random-gpt-oss-F16.gguf",
    "random-llama-F16.gguf",
    "random-qwen2moe-F16.gguf",
    "random-olmoe-F16.gguf",
    "random-dots1-F16.gguf",
    "tiny-qwen3moe-Q4_K_M.gguf",
    "tiny-gpt-oss-MXFP4.gguf",
];

pub fn open(name: &str) -> Gguf {
    Gguf::open(fixture(name)).unwrap()
}

/// The MoE layers of a model.
pub fn moe_layers(model: &Model) -> Vec<LayerId> {
    let layers = (0..model.hparams().n_layer as u16).map(LayerId);
    layers.filter(|&layer| model.has_experts(layer)).collect()
}

/// `n_lanes` lanes in CPU memory. Each expert is cached with a probability of `percent`, in a random lane and slot.
pub fn random_lanes(
    model: &Model,
    random: &mut SplitMix64,
    n_lanes: usize,
    percent: usize,
) -> Vec<LaneContents> {
    let empty = LaneContents {
        device: DeviceId::Cpu,
        experts: BTreeMap::new(),
    };
    let mut lanes = vec![empty; n_lanes];
    for layer in moe_layers(model) {
        let mut experts: Vec<u32> = (0..model.hparams().n_expert as u32).collect();
        for i in (1..experts.len()).rev() {
            experts.swap(i, random.below(i + 1));
        }
        for expert in experts {
            if random.below(100) < percent {
                let lane = &mut lanes[random.below(n_lanes)];
                lane.experts
                    .entry(layer)
                    .or_default()
                    .push(ExpertId(expert));
            }
        }
    }
    lanes
}

/// Layers and experts of lanes.
pub fn pairs(lanes: &[LaneContents]) -> BTreeSet<(LayerId, ExpertId)> {
    let layers = lanes.iter().flat_map(|lane| &lane.experts);
    layers
        .flat_map(|(&layer, experts)| experts.iter().map(move |&expert| (layer, expert)))
        .collect()
}

/// Logits and tokens of a request.
#[derive(Debug, PartialEq)]
pub struct Request {
    /// Logits after each pass.
    pub logits: Vec<Vec<f32>>,
    /// The tokens with the largest logits.
    pub tokens: Vec<usize>,
}

/// A prompt in two batches, then single tokens.
pub fn request(session: &mut Session, sequence_id: u32, first: u32) -> Request {
    session.begin_sequence(sequence_id);
    let mut done = Request {
        logits: Vec::new(),
        tokens: Vec::new(),
    };
    let mut pass = |tokens: &[u32], phase| {
        let logits = session.decode(tokens, phase, Logits::Last).unwrap();
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        done.logits.push(logits.to_vec());
        done.tokens.push(best.unwrap());
        best.unwrap() as u32
    };
    let prompt: Vec<u32> = (first..first + 13).collect();
    pass(&prompt[..9], Phase::Prompt);
    let mut token = pass(&prompt[9..], Phase::Prompt);
    for _ in 0..5 {
        token = pass(&[token], Phase::Generate);
    }
    done
}
