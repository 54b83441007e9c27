//! Comparison with llama.cpp under every policy and setting.

use moe_executor::cuda::Policy;
use moe_executor::cuda::post_fetch::{InjectedFault, Settings};

use super::failures::failing;
use super::{Case, MODELS, case};
use crate::reference::PROMPTS;

#[test]
fn model_on_gpu_matches_llama_cpp() {
    case(Policy::Gpu).compare(&MODELS, &PROMPTS);
}

#[test]
fn experts_on_cpu_match_llama_cpp() {
    case(Policy::Cpu).compare(&MODELS, &PROMPTS);
}

#[test]
fn experts_copied_on_demand_match_llama_cpp() {
    let on_demand = Case {
        n_cpu_moe: usize::MAX,
        ..case(Policy::Gpu)
    };
    on_demand.compare(&MODELS, &PROMPTS);
}

#[test]
fn post_fetch_matches_llama_cpp() {
    case(Policy::PostFetch).compare(&MODELS, &PROMPTS);
}

#[test]
fn post_fetch_without_copies_for_prompts_matches_llama_cpp() {
    let no_copies = Case {
        min_batch: None,
        ..case(Policy::PostFetch)
    };
    no_copies.compare(&MODELS, &["python", "long"]);
}

#[test]
fn some_layers_on_gpu_match_llama_cpp() {
    for n_gpu_layers in [0, 1, 3] {
        let some = Case {
            n_gpu_layers,
            ..case(Policy::Gpu)
        };
        some.compare(&MODELS, &["python", "long"]);
    }
}

#[test]
fn experts_of_first_layer_on_cpu_match_llama_cpp() {
    for policy in [Policy::Cpu, Policy::PostFetch] {
        let first = Case {
            n_cpu_moe: 1,
            ..case(policy)
        };
        first.compare(&MODELS, &["python", "long"]);
    }
}

#[test]
fn single_expert_matrices_on_gpu_match_llama_cpp() {
    const GATE: &[&str] = &["ffn_gate_exps=CUDA0"];
    const GATE_AND_UP: &[&str] = &["ffn_(gate|up)_exps=CUDA0"];
    const DOWN: &[&str] = &["ffn_down_exps=CUDA0"];
    for (overrides, policy) in [
        (GATE_AND_UP, Policy::Cpu),
        (GATE_AND_UP, Policy::PostFetch),
        (GATE, Policy::PostFetch),
        (DOWN, Policy::Cpu),
    ] {
        // With copies for prompts, the GPU would also compute the other matrices.
        let some = Case {
            overrides,
            min_batch: None,
            ..case(policy)
        };
        some.compare(&MODELS, &["python", "long"]);
    }
}

#[test]
fn every_setting_of_post_fetch_matches_llama_cpp() {
    let default = Settings::default();
    for post_fetch in [
        Settings {
            enable: false,
            ..default
        },
        Settings {
            force_cpu: true,
            ..default
        },
        Settings {
            block_on_miss: false,
            ..default
        },
        Settings {
            max_transfers: 2,
            ..default
        },
        Settings {
            dedicated_streams: false,
            ..default
        },
        Settings {
            cpu_limit: Some(1),
            ..default
        },
        Settings {
            cpu_limit: Some(3),
            ..default
        },
        // For some experts, the GPU computes gate and up, and the CPU computes down.
        Settings {
            cpu_limit: Some(1),
            max_transfers: 2,
            ..default
        },
        Settings {
            cpu_limit: Some(1),
            fault: Some(InjectedFault::LaterCopy),
            ..default
        },
    ] {
        let set = Case {
            post_fetch,
            ..case(Policy::PostFetch)
        };
        set.compare(&MODELS, &["python", "long"]);
    }
}

#[test]
fn cpu_fallback_after_every_failure_matches_llama_cpp() {
    for fault in [
        InjectedFault::Alloc,
        InjectedFault::Copy,
        InjectedFault::LaterCopy,
        InjectedFault::Kernel,
    ] {
        failing(fault).compare(&MODELS, &["python", "long"]);
    }
}
