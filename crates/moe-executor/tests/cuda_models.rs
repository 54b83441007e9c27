//! Models on the GPU, under every policy and with every failure, held to what llama.cpp did. Without a GPU the tests say so
//! and pass.

mod reference;

use std::cell::RefCell;
use std::rc::Rc;

use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::post_fetch::{Fault, Settings, State};
use moe_executor::cuda::{Device, Gpu, Policy};
use moe_executor::generate::Decode;
use moe_executor::placement::Placement;
use moe_executor::recorder::Recorder;
use moe_executor::session::Logits;
use moe_executor::{Model, Session};
use moe_gguf::Gguf;
use moe_trace::record::PHASE_PROMPT;
use reference::{Bounds, Distance, F16, PROMPTS, QUANTIZED, distances, fixtures};

/// As wide as the quantized bounds of the host, which are 1.25 times llama.cpp's own spread.
const MODELS: [(&str, &Bounds); 8] = [
    ("random-qwen3moe-F16", &F16),
    ("random-gpt-oss-F16", &F16),
    ("random-llama-F16", &F16),
    ("random-qwen2moe-F16", &F16),
    ("random-olmoe-F16", &F16),
    ("random-dots1-F16", &F16),
    ("tiny-qwen3moe-Q4_K_M", &QUANTIZED),
    ("tiny-gpt-oss-MXFP4", &QUANTIZED),
];

/// How a model is put onto the GPU.
#[derive(Clone, Copy, Debug)]
struct Case {
    n_gpu_layers: usize,
    experts_on_host: bool,
    policy: Policy,
    min_batch: Option<usize>,
    post_fetch: Settings,
    limit: Option<u64>,
}

fn case(policy: Policy) -> Case {
    Case {
        n_gpu_layers: usize::MAX,
        experts_on_host: policy != Policy::Gpu,
        policy,
        min_batch: Some(32),
        post_fetch: Settings::default(),
        limit: None,
    }
}

impl Case {
    fn open<'g>(&self, gguf: &'g Gguf, model: &Model<'g>) -> Option<Device<'g>> {
        let gpu = Gpu::open(self.limit).unwrap();
        let mut placement = Placement::new(model.hparams().n_layer, self.n_gpu_layers, Vec::new());
        if self.experts_on_host {
            placement = placement.experts_on_host(None);
        }
        let mut device = Device::new(gpu, placement, self.policy, self.min_batch);
        if self.experts_on_host && !device.register(gguf) {
            println!("the driver does not register the mapped model");
        }
        Some(match self.policy {
            Policy::PostFetch => device.with_post_fetch(self.post_fetch).unwrap(),
            _ => device,
        })
    }

    /// Holds models to llama.cpp; all that is outside the bounds is told together.
    fn holds(&self, models: &[(&str, &Bounds)], prompts: &[&str]) {
        if let Err(missing) = Gpu::look() {
            println!("not run: {missing}");
            return;
        }
        let mut faults = Vec::new();
        for (name, bounds) in models {
            let gguf = Gguf::open(fixtures().join(format!("{name}.gguf"))).unwrap();
            let all = distances(&gguf, name, prompts, &|gguf, model| self.open(gguf, model));
            let all = all.into_iter().fold(Distance::default(), Distance::and);
            if !all.is_within(bounds) {
                faults.push(format!("{name}: {all}"));
            }
        }
        assert!(faults.is_empty(), "{self:?}\n{}", faults.join("\n"));
    }
}

#[test]
fn the_whole_model_on_the_gpu() {
    case(Policy::Gpu).holds(&MODELS, &PROMPTS);
}

#[test]
fn experts_with_the_host() {
    case(Policy::Cpu).holds(&MODELS, &["python", "long"]);
}

#[test]
fn experts_copied_when_they_are_chosen() {
    let on_demand = Case {
        experts_on_host: true,
        ..case(Policy::Gpu)
    };
    on_demand.holds(&MODELS, &["python", "long"]);
}

#[test]
fn down_travels_while_the_host_computes() {
    for own_thread in [true, false] {
        let travels = Case {
            post_fetch: Settings {
                own_thread,
                ..Settings::default()
            },
            ..case(Policy::PostFetch)
        };
        travels.holds(&MODELS, &PROMPTS);
    }
}

#[test]
fn prompts_are_not_copied_for() {
    let no_copies = Case {
        min_batch: None,
        ..case(Policy::PostFetch)
    };
    no_copies.holds(&MODELS, &["python", "long"]);
}

#[test]
fn some_layers_on_the_gpu() {
    for n_gpu_layers in [0, 1, 3] {
        let some = Case {
            n_gpu_layers,
            ..case(Policy::Gpu)
        };
        some.holds(&MODELS, &["python", "long"]);
    }
}

#[test]
fn settings_of_post_fetch() {
    let given = Settings::default();
    for post_fetch in [
        Settings {
            enable: false,
            ..given
        },
        Settings {
            force_cpu: true,
            ..given
        },
        Settings {
            block_on_miss: false,
            ..given
        },
        Settings {
            max_transfers: 2,
            ..given
        },
        Settings {
            scratchpad_bytes: Some(1 << 20),
            ..given
        },
        Settings {
            dedicated_streams: false,
            ..given
        },
        Settings {
            own_thread: false,
            block_on_miss: false,
            ..given
        },
        Settings {
            cpu_limit: Some(1),
            ..given
        },
        Settings {
            cpu_limit: Some(3),
            ..given
        },
    ] {
        let set = Case {
            post_fetch,
            ..case(Policy::PostFetch)
        };
        set.holds(&MODELS, &["python", "long"]);
    }
}

#[test]
fn whatever_fails_the_host_does() {
    for fault in [Fault::Alloc, Fault::Copy, Fault::LaterCopy, Fault::Kernel] {
        for own_thread in [true, false] {
            let failing = Case {
                post_fetch: Settings {
                    fault: Some(fault),
                    own_thread,
                    ..Settings::default()
                },
                ..case(Policy::PostFetch)
            };
            failing.holds(&MODELS, &["python", "long"]);
        }
    }
}

/// Only the first transfer of each layer begins; the thread of its own hears of the others' failure.
#[test]
fn what_began_is_used_and_what_did_not_is_told() {
    if let Err(missing) = Gpu::look() {
        println!("not run: {missing}");
        return;
    }
    let gguf = Gguf::open(fixtures().join("tiny-qwen3moe-Q4_K_M.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let (n_layer, k) = (model.hparams().n_layer, model.hparams().n_expert_used);
    for own_thread in [true, false] {
        let failing = Case {
            post_fetch: Settings {
                fault: Some(Fault::LaterCopy),
                own_thread,
                ..Settings::default()
            },
            ..case(Policy::PostFetch)
        };
        let mut device = failing.open(&gguf, &model).unwrap();
        let told = Rc::new(RefCell::new(Vec::new()));
        let seen = told.clone();
        device.observe_transfers(Box::new(move |transfer| seen.borrow_mut().push(transfer)));
        let (threads, recorder) = (Threads::new(2).unwrap(), Recorder::new(None));
        let mut session = Session::with_device(&model, &threads, Some(device), recorder, 8);
        session.decode(&[1], PHASE_PROMPT, Logits::Last).unwrap();

        let fallbacks = &session.device().unwrap().fallbacks;
        assert_eq!(fallbacks.ops, n_layer as u64, "one error a layer");
        let first = fallbacks.first.as_deref();
        assert_eq!(first, Some("a transfer was made to fail"));
        let told = told.borrow();
        let count = |state| told.iter().filter(|t| t.state == state).count();
        assert_eq!(count(State::CopyInFlight), n_layer * k);
        assert_eq!(count(State::GpuReady), n_layer);
        assert_eq!(count(State::CpuOnly), n_layer * (k - 1));
    }
}

#[test]
fn a_small_memory_leaves_tensors_with_the_host() {
    let small = Case {
        limit: Some(6 << 20),
        ..case(Policy::Gpu)
    };
    small.holds(&MODELS, &["python", "long"]);
}
