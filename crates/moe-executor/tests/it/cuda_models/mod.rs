//! Models on the GPU: held to what llama.cpp did under every policy and with every failure, what is recorded of them, how often
//! the host waits, what memory they take. Without a GPU the tests are skipped.

mod failures;
mod memory;
mod policies;
mod recorded;
mod records;
mod scratchpad;
mod several;
mod sound;
mod waits;

use moe_executor::cuda::post_fetch::Settings;
use moe_executor::cuda::{Gpu, GpuSpec, Policy};
use moe_executor::placement::Rules;
use moe_executor::{Devices, Model};
use moe_gguf::Gguf;
use moe_testkit::{Need, Report, fixture, skip};

use crate::reference::{Bounds, Distance, F16, GPT_OSS, Look, OfPrompt, Open, QWEN3MOE, distances};

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

/// Whether there is a GPU; skips the running test if not.
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

/// A GPU of a list: the number of the physical GPU, and the limit of its memory as a share of what the model's matrices take.
type Entry = (usize, Option<f64>);

/// The first GPU.
const ONCE: &[Entry] = &[(0, None)];
/// The first GPU, listed twice.
const TWICE: &[Entry] = &[(0, None), (0, None)];

/// How a model is put onto GPUs.
#[derive(Clone, Copy, Debug)]
struct Case {
    gpus: &'static [Entry],
    /// Shares of the layers of each GPU; empty: equal ones.
    split: &'static [f32],
    n_gpu_layers: usize,
    /// Layers whose experts live with the host, the first ones.
    n_cpu_moe: usize,
    /// Rules before that, as `--override-tensor` takes them.
    overrides: &'static [&'static str],
    policy: Policy,
    min_batch: Option<usize>,
    post_fetch: Settings,
    /// Size of the scratchpad in down matrices of an expert, those of the layer with the largest.
    scratchpad: Option<f64>,
}

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
        post_fetch: Settings::default(),
        scratchpad: None,
    }
}

impl Case {
    fn open<'g>(&self, gguf: &'g Gguf, model: &Model<'g>) -> Devices<'g> {
        let specs = self.gpus.iter().map(|&(ordinal, share)| GpuSpec {
            ordinal,
            limit: share.map(|share| limit(gguf, share)),
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
        let some_on_host = self.n_cpu_moe > 0 || !self.overrides.is_empty();
        if some_on_host && !devices.register(gguf) {
            println!("the driver does not register the mapped model");
        }
        let post_fetch = Settings {
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

    /// Holds models to llama.cpp; all that is outside the bounds is told together.
    fn holds(&self, models: &[(&str, &Bounds)], prompts: &[&str]) {
        self.holds_and(models, prompts, &|_| None);
    }

    /// The same, and looks at the devices after each prompt.
    fn holds_and(&self, models: &[(&str, &Bounds)], prompts: &[&str], look: Look) {
        if !has_gpu() {
            return;
        }
        assert!(prompts.len() > 1, "bounds are for a group of prompts");
        let mut report = Report::default();
        for &(name, bounds) in models {
            let gguf = open(name);
            let open: Open = &|gguf, model| self.open(gguf, model);
            let of_prompts = distances(&gguf, name, prompts, open, look);
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
            // Rounding of the activations makes the near ties of a quantized model fall either way, and each carries on
            // through the text that follows it; so they are counted over all prompts.
            let all = of_prompts.iter().map(|of_prompt| of_prompt.all);
            let all = all.fold(Distance::default(), Distance::and);
            if !all.is_within(bounds) {
                report.fail(format!("{name}, all prompts: {all}; {self:?}"));
            }
        }
        report.finish();
    }
}

/// What of a prompt is outside the bounds of an F16 model.
///
/// Its rounding hardly matters but for a tie: two experts whose scores are nearer to each other than what rounding leaves of
/// them. If it falls the other way, no implementation is wrong, and the text behind it is another one, since it reads the keys
/// and values of that token. So a prompt must be within the bounds up to such a token, and as a whole if there is none.
/// That experts which were swapped lie close together holds for all of it, as do the bounds of all prompts together.
fn outside(what: &str, of_prompt: &OfPrompt, bounds: &Bounds) -> Option<String> {
    let (all, before) = (&of_prompt.all, &of_prompt.before_other_experts);
    if all.is_within(bounds) {
        return None;
    }
    let Some(at) = of_prompt.other_experts_at else {
        return Some(all.to_string());
    };
    let text = format!("{all}; before the first other choice, at position {at}: {before}");
    if all.has_near_ties(bounds) && before.is_within(bounds) {
        println!("{what}: taken for a tie that fell the other way: {text}");
        return None;
    }
    Some(text)
}

/// A share of what the matrices take that can live on the GPU: all but the embeddings.
fn limit(gguf: &Gguf, share: f64) -> u64 {
    let matrices = gguf.tensors().iter().filter(|tensor| {
        tensor.n_dims > 1 && tensor.name.ends_with(".weight") && tensor.name != "token_embd.weight"
    });
    let bytes: u64 = matrices.map(|tensor| tensor.size_bytes).sum();
    (bytes as f64 * share) as u64
}

/// Bytes of the down matrix of an expert of a layer; 0 if it has no experts.
fn down_size(gguf: &Gguf, model: &Model, il: usize) -> usize {
    let stack = gguf.tensor(&format!("blk.{il}.ffn_down_exps.weight"));
    stack.map_or(0, |stack| {
        stack.size_bytes as usize / model.hparams().n_expert
    })
}
