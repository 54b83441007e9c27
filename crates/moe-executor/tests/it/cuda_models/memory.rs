//! What the limit of the memory leaves with the host.

use moe_executor::cuda::{Device, Policy};

use super::{Case, MODELS, case};

/// Of matrices that take twice the limit some must stay with the host.
fn leaves_tensors_with_the_host(device: &Device) -> Option<String> {
    let (_, peak, limit) = device.gpu().memory();
    let fallbacks = &device.fallbacks;
    println!(
        "testing: at most {peak} of {limit} bytes, {} tensors with the host, {} operations done there instead",
        fallbacks.tensors.len(),
        fallbacks.ops
    );
    let is_right = peak <= limit && !fallbacks.tensors.is_empty() && fallbacks.first.is_some();
    (!is_right).then(|| format!("at most {peak} of {limit} bytes, {fallbacks:?}"))
}

#[test]
fn a_small_memory_leaves_tensors_with_the_host() {
    for policy in [Policy::Gpu, Policy::PostFetch] {
        let small = Case {
            n_cpu_moe: 0,
            share: Some(0.5),
            ..case(policy)
        };
        let prompts = ["python", "long"];
        small.holds_and(&MODELS, &prompts, &leaves_tensors_with_the_host);
    }
}

#[test]
fn without_memory_all_stays_with_the_host() {
    let none = Case {
        share: Some(0.0),
        ..case(Policy::Gpu)
    };
    none.holds_and(&MODELS, &["python"], &|device| {
        let memory = device.gpu().memory();
        let left = leaves_tensors_with_the_host(device);
        left.or((memory != (0, 0, 0)).then(|| format!("{memory:?} bytes used, at most, allowed")))
    });
}
