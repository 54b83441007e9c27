//! How often the host waits for the GPU.

use moe_executor::cuda::Policy;
use moe_trace::record::{PHASE_GENERATE, lane};

use super::recorded::record;
use super::{MODELS, case, has_gpu, open};
use moe_testkit::Report;

/// With all of a model on the GPU and every operation recorded, a token's layers, its experts and their records cost no wait:
/// the host waits for the logits and for the end of the pass.
#[test]
fn no_layer_waits() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for (name, _) in MODELS {
        let recorded = record(&open(name), Some(&case(Policy::Gpu)), false);
        let waits: Vec<u64> = recorded.passes.iter().map(|pass| pass.waits).collect();
        println!("{name}: waits of the passes {waits:?}");
        // The prompt takes memory, and the first token more for the cache.
        let others = waits[2..].iter().any(|&waits| waits != 2);
        let experts = recorded.records.iter().filter(|r| r.num_experts > 0);
        let elsewhere = experts.filter(|r| {
            let lanes = &r.expert_lane[..r.expert_ids().len()];
            r.phase == PHASE_GENERATE && lanes.iter().any(|&lane| lane != lane::GPU_RESIDENT)
        });
        let elsewhere = elsewhere.count();
        if others || elsewhere > 0 || recorded.fallbacks.ops > 0 {
            report.fail(format!(
                "{name}: waits of the passes {waits:?}, not 2 each from the third on; {elsewhere} records of experts not on \
                 the GPU; {:?}",
                recorded.fallbacks
            ));
        }
    }
    report.finish();
}
