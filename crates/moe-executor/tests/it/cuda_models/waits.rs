//! How often the host waits for the GPU.

use moe_executor::cuda::Policy;
use moe_trace::record::{PHASE_GENERATE, lane};

use super::recorded::record;
use super::{Case, MODELS, ONCE, TWICE, case, has_gpu, open};
use moe_testkit::Report;

/// With all of a model on the GPU and every operation recorded, a token's layers, its experts and their records cost no wait:
/// the host waits for the logits and, on each GPU, for the end of the pass.
#[test]
fn no_layer_waits() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for ((name, _), gpus) in MODELS.into_iter().flat_map(|m| [(m, ONCE), (m, TWICE)]) {
        let on_gpus = Case {
            gpus,
            ..case(Policy::Gpu)
        };
        let wanted = 1 + gpus.len() as u64;
        let recorded = record(&open(name), Some(&on_gpus), false);
        let waits: Vec<u64> = recorded.passes.iter().map(|pass| pass.waits).collect();
        println!("{name}, {} GPUs: waits of the passes {waits:?}", gpus.len());
        // The prompt takes memory, and the first token more for the cache.
        let others = waits[2..].iter().any(|&waits| waits != wanted);
        let experts = recorded.records.iter().filter(|r| r.num_experts > 0);
        let elsewhere = experts.filter(|r| {
            let lanes = &r.expert_lane[..r.expert_ids().len()];
            r.phase == PHASE_GENERATE && lanes.iter().any(|&lane| lane != lane::GPU_RESIDENT)
        });
        let elsewhere = elsewhere.count();
        if others || elsewhere > 0 || recorded.fallbacks.ops > 0 {
            report.fail(format!(
                "{name}, {} GPUs: waits of the passes {waits:?}, not {wanted} each from the third on; {elsewhere} records of \
                 experts not on a GPU; {:?}",
                gpus.len(),
                recorded.fallbacks
            ));
        }
    }
    report.finish();
}
