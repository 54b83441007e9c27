//! Every policy and setting, held to llama.cpp.

use moe_executor::cuda::Policy;
use moe_executor::cuda::post_fetch::{InjectedFault, Settings};

use super::failures::failing;
use super::{Case, MODELS, case};
use crate::reference::PROMPTS;

#[test]
fn the_whole_model_on_the_gpu() {
    case(Policy::Gpu).holds(&MODELS, &PROMPTS);
}

#[test]
fn experts_with_the_host() {
    case(Policy::Cpu).holds(&MODELS, &PROMPTS);
}

#[test]
fn experts_copied_when_they_are_chosen() {
    let on_demand = Case {
        n_cpu_moe: usize::MAX,
        ..case(Policy::Gpu)
    };
    on_demand.holds(&MODELS, &PROMPTS);
}

#[test]
fn down_travels_while_the_host_computes() {
    case(Policy::PostFetch).holds(&MODELS, &PROMPTS);
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
fn the_first_layer_s_experts_with_the_host() {
    for policy in [Policy::Cpu, Policy::PostFetch] {
        let first = Case {
            n_cpu_moe: 1,
            ..case(policy)
        };
        first.holds(&MODELS, &["python", "long"]);
    }
}

#[test]
fn some_matrices_of_the_experts_on_the_gpu() {
    const GATE: &[&str] = &["ffn_gate_exps=CUDA0"];
    const GATE_AND_UP: &[&str] = &["ffn_(gate|up)_exps=CUDA0"];
    const DOWN: &[&str] = &["ffn_down_exps=CUDA0"];
    for (overrides, policy) in [
        (GATE_AND_UP, Policy::Cpu),
        (GATE_AND_UP, Policy::PostFetch),
        (GATE, Policy::PostFetch),
        (DOWN, Policy::Cpu),
    ] {
        // Copies for prompts would bring the others there, too.
        let some = Case {
            overrides,
            min_batch: None,
            ..case(policy)
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
            dedicated_streams: false,
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
        // What the host goes on with, the GPU has computed.
        Settings {
            cpu_limit: Some(1),
            max_transfers: 2,
            ..given
        },
        Settings {
            cpu_limit: Some(1),
            fault: Some(InjectedFault::LaterCopy),
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
    for fault in [
        InjectedFault::Alloc,
        InjectedFault::Copy,
        InjectedFault::LaterCopy,
        InjectedFault::Kernel,
    ] {
        failing(fault).holds(&MODELS, &["python", "long"]);
    }
}
