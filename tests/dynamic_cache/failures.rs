//! A GPU that fails, with a replacement for its driver: the CPU computes the experts, and the run contains the failures.

use std::path::Path;

use moe_trace::dynamic_cache::Failures;

use super::{Workplace, dynamic_cache};
use crate::support::gpu::{stand_in, with_gpu};
use crate::support::{args, run};

/// Failures of a run on a GPU that fails at a step. Its text is that of the CPU.
fn failures(work: &Workplace, driver: &Path, fails: &str) -> Failures {
    let out = work.path(fails);
    let prompt = ["-p", "The kernel driver", "-n", "8", "-t", "1", "--ignore-eos"];
    let expected = run![
        "--quiet",
        "record",
        "--model",
        work.model,
        prompt,
        "--out",
        work.path("cpu"),
        "--force"
    ];
    let gpu = ["--device", "cuda", "-ngl", "0", "--offload-min-batch", "0"];
    let cache = ["--policy", "dynamic", "--hot-cache-mib", "8", "--predictor", "markov"];
    let record =
        args!["--quiet", "record", "--model", work.model, prompt, gpu, cache, "--out", out];
    let done = with_gpu(driver, fails, &record).assert().success();
    assert_eq!(String::from_utf8_lossy(&done.get_output().stdout), expected, "{fails}");
    let cache = dynamic_cache(&out);
    assert_eq!(cache.device, "CUDA0");
    let counts = cache.counts.unwrap();
    assert!(counts.look_ups[0] > 0 && counts.look_ups[1] > 0, "{fails}");
    cache.failures.unwrap()
}

#[test]
fn cpu_computes_experts_if_the_gpu_fails() {
    let Some(driver) = stand_in() else { return };
    let work = Workplace::new("F32");
    let memory = failures(&work, driver.path(), "memory");
    assert_eq!((memory.layers, memory.calls, memory.copies), (4, 0, 0));
    assert!(memory.first_error.unwrap().contains("out of memory"));
    let weights = failures(&work, driver.path(), "weights");
    assert_eq!((weights.layers, weights.calls), (0, 0));
    assert!(weights.copies > 0);
    assert!(
        weights
            .first_error
            .unwrap()
            .contains("CUDA_ERROR_INVALID_VALUE")
    );
    let kernel = failures(&work, driver.path(), "kernel");
    assert_eq!((kernel.layers, kernel.copies), (0, 0));
    assert!(kernel.calls > 0);
    assert!(
        kernel
            .first_error
            .unwrap()
            .contains("CUDA_ERROR_LAUNCH_FAILED")
    );
}
