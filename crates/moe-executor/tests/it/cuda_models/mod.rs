//! Models on GPUs: results compared with llama.cpp under every policy and after every failure, records, waits of the CPU, and GPU
//! memory. The tests are skipped without a GPU.

mod architectures;
mod dynamic;
mod failures;
mod graphs;
mod hot_cache;
mod memory;
mod multi_gpu;
mod policies;
mod recording;
mod records;
mod recurrent;
mod scratchpad;
mod soundness;
mod waits;

use moe_executor::cuda::post_fetch;
use moe_executor::cuda::{Gpu, GpuSpec, Policy};
use moe_executor::hot_cache::{DynamicParams, LaneContents, Profile};
use moe_executor::placement::Rules;
use moe_executor::{DeviceId, Devices, Model, Session};
use moe_gguf::Gguf;
use moe_placement::cache::PolicyName;
use moe_placement::dynamic::Settings;
use moe_placement::perf::PerfMode;
use moe_placement::predict::PredictorName;
use moe_placement::random::SplitMix64;
use moe_testkit::{Need, Report, fixture, skip};

use crate::hot_cache::dynamic::sizes;
use crate::hot_cache::random_lanes;
use crate::reference::{
    Bounds, Distance, F16, GPT_OSS, Look, Open, Prepare, PromptDistance, QWEN3MOE, distances,
};

/// Fixtures with the maximum distance of each from llama.cpp.
const MODELS: [(&str, &Bounds); 8] = [
    ("random-qwen3moe-F16", &F16),
    ("random-gpt-oss-F16", &F16),
    ("random-llama-F16", &F16),
    ("random-qwen2moe-F16", &F16),
    ("random-olmoe-F16", &F16),
    ("random-dots1-F16", &F16),
    ("tiny-qwen3moe-Q4_K_M", &QWEN3MOE),
    ("tiny-gpt-oss-MXFP4", &GPT_OSS),
];

fn open(name: &str) -> Gguf {
    Gguf::open(fixture(format!("{name}.gguf"))).unwrap()
}

/// Whether the machine has a GPU. If not, reports the test as skipped; the caller must return.
#[track_caller]
fn has_gpu() -> bool {
    match Gpu::detect() {
        Ok(()) => true,
        Err(missing) => {
            skip(Need::Gpu, missing);
            false
        }
    }
}

/// An entry of the list of GPUs: the index of the physical GPU, and its memory limit as a fraction of the size of the matrices
/// that can be on a GPU.
type Entry = (usize, Option<f64>);

/// GPU 0.
const ONCE: &[Entry] = &[(0, None)];
/// GPU 0, listed twice.
const TWICE: &[Entry] = &[(0, None), (0, None)];

/// Placement of a model on GPUs, and the settings that it runs with.
#[derive(Clone, Copy, Debug)]
struct Case {
    gpus: &'static [Entry],
    /// Proportion of the layers on each GPU; empty: equal.
    split: &'static [f32],
    n_gpu_layers: usize,
    /// Number of layers, from the first one, with experts in CPU memory.
    n_cpu_moe: usize,
    /// Rules that take precedence, in the syntax of `--override-tensor`.
    overrides: &'static [&'static str],
    policy: Policy,
    /// Number of tokens from which weights in CPU memory are copied to the GPU for a product; `None`: never.
    min_batch: Option<usize>,
    post_fetch: post_fetch::Settings,
    /// Size of the scratchpad as a multiple of the largest down matrix of an expert; `None`: as large as required.
    scratchpad: Option<f64>,
    /// A hot cache with random experts.
    hot: Option<RandomLanes>,
    /// Its settings; `None`: those of the architecture.
    profile: Option<Profile>,
    /// A dynamic cache.
    dynamic: Option<Dynamic>,
}

/// A dynamic cache on GPU 0.
#[derive(Clone, Copy, Debug)]
struct Dynamic {
    /// Budget in percent of the bytes of all experts.
    percent: u64,
    policy: PolicyName,
    predictor: Option<PredictorName>,
}

/// Lanes of a hot cache with random experts.
#[derive(Clone, Copy, Debug)]
struct RandomLanes {
    /// Device of each lane.
    devices: &'static [DeviceId],
    /// Probability in percent that an expert is cached.
    percent: usize,
}

impl RandomLanes {
    fn contents(&self, model: &Model) -> Vec<LaneContents> {
        let mut random = SplitMix64::new(self.percent as u64);
        let lanes = random_lanes(model, &mut random, self.devices.len(), self.percent);
        let devices = self.devices.iter().zip(lanes);
        let lanes = devices.map(|(&device, lane)| LaneContents { device, ..lane });
        lanes.collect()
    }
}

/// The entire model on GPU 0; for the policies that compute experts on the CPU, without the experts.
fn case(policy: Policy) -> Case {
    Case {
        gpus: ONCE,
        split: &[],
        n_gpu_layers: usize::MAX,
        n_cpu_moe: match policy {
            Policy::Gpu => 0,
            Policy::Cpu | Policy::PostFetch => usize::MAX,
        },
        overrides: &[],
        policy,
        min_batch: Some(32),
        post_fetch: post_fetch::Settings::default(),
        scratchpad: None,
        hot: None,
        profile: None,
        dynamic: None,
    }
}

impl Case {
    fn open<'g>(&self, gguf: &'g Gguf, model: &Model<'g>) -> Devices<'g> {
        let specs = self.gpus.iter().map(|&(ordinal, fraction)| GpuSpec {
            ordinal,
            limit: fraction.map(|fraction| limit(gguf, fraction)),
        });
        let gpus = Gpu::open_all(&specs.collect::<Vec<_>>()).unwrap();
        let n_layer = model.hparams().n_layer;
        let overrides = self.overrides.iter().map(|rule| rule.parse().unwrap());
        let rules = Rules::new(n_layer, self.n_gpu_layers, overrides.collect());
        let rules = rules.split_layers(match self.split {
            [] => vec![1.0; gpus.len()],
            split => split.to_vec(),
        });
        let rules = rules.experts_on_cpu(match self.n_cpu_moe {
            usize::MAX => None,
            n => Some(n),
        });
        let names = gguf.tensors().iter().map(|tensor| tensor.name.as_str());
        let placement = rules.resolve(names).unwrap();
        let mut devices = Devices::new(gpus, placement, self.policy, self.min_batch);
        let has_cpu_tensors = self.n_cpu_moe > 0 || !self.overrides.is_empty();
        if has_cpu_tensors && !devices.register(gguf) {
            println!("the driver cannot register the mapped model");
        }
        let post_fetch = post_fetch::Settings {
            scratchpad_bytes: self.scratchpad.map(|experts| {
                let largest = (0..n_layer).map(|il| down_size(gguf, model, il)).max();
                (experts * largest.unwrap_or(0) as f64) as usize
            }),
            ..self.post_fetch
        };
        match self.policy {
            Policy::PostFetch => devices.with_post_fetch(post_fetch).unwrap(),
            _ => devices,
        }
    }

    /// Enables the hot or dynamic cache of the case.
    fn prepare(&self, session: &mut Session) {
        if let Some(hot) = &self.hot {
            let lanes = hot.contents(session.model());
            session
                .expert_cache()
                .enable_hot_cache(&lanes, PerfMode::Update)
                .unwrap();
            if let Some(profile) = self.profile {
                session.set_hot_cache_profile(profile);
            }
        }
        if let Some(dynamic) = &self.dynamic {
            let model = session.model();
            let sizes = sizes(model.gguf(), model);
            let all: u64 = sizes.iter().map(|(_, _, bytes)| bytes).sum();
            let params = DynamicParams {
                settings: Settings {
                    predictor: dynamic.predictor,
                    ..Settings::new(dynamic.policy, all * dynamic.percent / 100)
                },
                sizes,
                device: DeviceId::Gpu(0),
            };
            let report = session
                .expert_cache()
                .enable_dynamic_cache(&params, PerfMode::Update);
            assert_eq!(report.unwrap().dropped, []);
        }
    }

    /// Compares models with llama.cpp. Reports everything outside the bounds at the end.
    fn compare(&self, models: &[(&str, &Bounds)], prompts: &[&str]) {
        self.compare_and_check(models, prompts, &|_| None);
    }

    /// Compares models with llama.cpp, and checks the devices after each prompt.
    fn compare_and_check(&self, models: &[(&str, &Bounds)], prompts: &[&str], look: Look) {
        if !has_gpu() {
            return;
        }
        assert!(prompts.len() > 1, "bounds apply to a group of prompts");
        let mut report = Report::default();
        for &(name, bounds) in models {
            let gguf = open(name);
            let open: Open = &|gguf, model| self.open(gguf, model);
            let prepare: Prepare = &|session| self.prepare(session);
            let setup = (open, prepare);
            let of_prompts = distances(&gguf, name, prompts, setup, look);
            for (prompt, of_prompt) in prompts.iter().zip(&of_prompts) {
                let outside = if name.ends_with("F16") {
                    outside(&format!("{name} {prompt}"), of_prompt, bounds)
                } else {
                    None
                };
                for wrong in outside.iter().chain(&of_prompt.wrong) {
                    report.fail(format!("{name} {prompt}: {wrong}; {self:?}"));
                }
            }
            // Rounded activations decide near ties of a quantized model either way, and each affects all later tokens.
            // Therefore the bounds apply to all prompts together.
            let all = of_prompts.iter().map(|of_prompt| of_prompt.all);
            let all = all.fold(Distance::default(), Distance::and);
            if !all.is_within(bounds) {
                report.fail(format!("{name}, all prompts: {all}; {self:?}"));
            }
        }
        report.finish();
    }
}

/// Describes how a prompt of an F16 model is outside the bounds; `None` if it is within them.
///
/// Rounding has little effect on such a model, except in a tie: two experts with scores closer to each other than the rounding
/// error. Either order is correct, but results of later tokens differ, because they depend on the keys and values of that token.
/// Therefore a prompt must be within the bounds up to the first token with other experts, and entirely without such a token.
/// Swapped experts must have similar scores in the entire prompt.
fn outside(what: &str, of_prompt: &PromptDistance, bounds: &Bounds) -> Option<String> {
    let (all, before) = (&of_prompt.all, &of_prompt.before_other_experts);
    if all.is_within(bounds) {
        return None;
    }
    let Some(position) = of_prompt.other_experts_at else {
        return Some(all.to_string());
    };
    let text = format!(
        "{all}; before the first token with other experts, at position {position}: {before}"
    );
    if all.has_near_ties(bounds) && before.is_within(bounds) {
        println!("{what}: accepted as a tie: {text}");
        return None;
    }
    Some(text)
}

/// A fraction of the size of the matrices that can be on a GPU, in bytes. These are all matrices except the embeddings.
fn limit(gguf: &Gguf, fraction: f64) -> u64 {
    let matrices = gguf.tensors().iter().filter(|tensor| {
        tensor.n_dims > 1 && tensor.name.ends_with(".weight") && tensor.name != "token_embd.weight"
    });
    let bytes: u64 = matrices.map(|tensor| tensor.size_bytes).sum();
    (bytes as f64 * fraction) as u64
}

/// Size of the down matrix of one expert of a layer in bytes; 0 for a layer without experts.
fn down_size(gguf: &Gguf, model: &Model, il: usize) -> usize {
    let stack = gguf.tensor(&format!("blk.{il}.ffn_down_exps.weight"));
    stack.map_or(0, |stack| {
        stack.size_bytes as usize / model.hparams().n_expert
    })
}
