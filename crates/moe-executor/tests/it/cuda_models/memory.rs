//! Limited GPU memory: the GPU uses no more, and the CPU computes tensors that do not fit.

use moe_executor::Devices;
use moe_executor::cuda::Policy;

use super::{Case, MODELS, case};
use crate::reference::PROMPTS;

/// Describes the GPUs that exceed their limit, or whose limit has no effect. The matrices must be larger than each limit.
fn limit_faults(devices: &Devices) -> Option<String> {
    let wrong = devices.gpus().iter().filter_map(|gpu| {
        let (_, peak, limit) = gpu.gpu().memory();
        let (id, fallbacks) = (gpu.id(), &gpu.fallbacks);
        println!(
            "testing: {id} used at most {peak} of {limit} bytes; {} tensors and {} operations left to the CPU",
            fallbacks.tensors.len(),
            fallbacks.ops
        );
        let is_right = peak <= limit && !fallbacks.tensors.is_empty() && fallbacks.first.is_some();
        (!is_right).then(|| format!("{id} used at most {peak} of {limit} bytes; {fallbacks:?}"))
    });
    wrong.reduce(|all, wrong| format!("{all}; {wrong}"))
}

#[test]
fn cpu_computes_tensors_over_the_memory_limit() {
    for policy in [Policy::Gpu, Policy::PostFetch] {
        let small = Case {
            n_cpu_moe: 0,
            gpus: &[(0, Some(0.5))],
            ..case(policy)
        };
        let prompts = ["python", "long"];
        small.compare_and_check(&MODELS, &prompts, &limit_faults);
    }
}

/// About half of the matrices are assigned to each of two entries of one GPU.
#[test]
fn each_entry_of_a_gpu_has_its_own_limit() {
    let small = Case {
        gpus: &[(0, Some(0.3)), (0, Some(0.2))],
        ..case(Policy::Gpu)
    };
    small.compare_and_check(&MODELS, &PROMPTS, &|devices| {
        let limits = devices.gpus().iter().map(|gpu| gpu.gpu().memory().2);
        let limits: Vec<u64> = limits.collect();
        let faults = limit_faults(devices);
        faults.or((limits[0] <= limits[1]).then(|| format!("limits {limits:?}")))
    });
}

#[test]
fn cpu_computes_all_tensors_with_a_limit_of_zero() {
    let none = Case {
        gpus: &[(0, Some(0.0))],
        ..case(Policy::Gpu)
    };
    none.compare_and_check(&MODELS, &["python", "long"], &|devices| {
        let memory = devices.gpus()[0].gpu().memory();
        let faults = limit_faults(devices);
        faults.or((memory != (0, 0, 0))
            .then(|| format!("{memory:?}, not (0, 0, 0) bytes used, maximum, limit")))
    });
}
