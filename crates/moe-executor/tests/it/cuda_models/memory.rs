//! What the limit of the memory leaves with the host.

use moe_executor::Devices;
use moe_executor::cuda::Policy;

use super::{Case, MODELS, case};
use crate::reference::PROMPTS;

/// Of matrices that take more than the limit of each GPU some must stay with the host.
fn leaves_tensors_with_the_host(devices: &Devices) -> Option<String> {
    let wrong = devices.gpus().iter().filter_map(|gpu| {
        let (_, peak, limit) = gpu.gpu().memory();
        let (id, fallbacks) = (gpu.id(), &gpu.fallbacks);
        println!(
            "testing: {id} at most {peak} of {limit} bytes, {} tensors with the host, {} operations done there instead",
            fallbacks.tensors.len(),
            fallbacks.ops
        );
        let is_right = peak <= limit && !fallbacks.tensors.is_empty() && fallbacks.first.is_some();
        (!is_right).then(|| format!("{id} at most {peak} of {limit} bytes, {fallbacks:?}"))
    });
    wrong.reduce(|all, wrong| format!("{all}; {wrong}"))
}

#[test]
fn a_small_memory_leaves_tensors_with_the_host() {
    for policy in [Policy::Gpu, Policy::PostFetch] {
        let small = Case {
            n_cpu_moe: 0,
            gpus: &[(0, Some(0.5))],
            ..case(policy)
        };
        let prompts = ["python", "long"];
        small.holds_and(&MODELS, &prompts, &leaves_tensors_with_the_host);
    }
}

/// Half of the matrices are for each of two entries of one GPU.
#[test]
fn each_entry_of_a_gpu_has_its_own_limit() {
    let small = Case {
        gpus: &[(0, Some(0.3)), (0, Some(0.2))],
        ..case(Policy::Gpu)
    };
    small.holds_and(&MODELS, &PROMPTS, &|devices| {
        let limits = devices.gpus().iter().map(|gpu| gpu.gpu().memory().2);
        let limits: Vec<u64> = limits.collect();
        let left = leaves_tensors_with_the_host(devices);
        left.or((limits[0] <= limits[1]).then(|| format!("limits {limits:?}")))
    });
}

#[test]
fn without_memory_all_stays_with_the_host() {
    let none = Case {
        gpus: &[(0, Some(0.0))],
        ..case(Policy::Gpu)
    };
    none.holds_and(&MODELS, &["python", "long"], &|devices| {
        let memory = devices.gpus()[0].gpu().memory();
        let left = leaves_tensors_with_the_host(devices);
        left.or((memory != (0, 0, 0)).then(|| format!("{memory:?} bytes used, at most, allowed")))
    });
}
