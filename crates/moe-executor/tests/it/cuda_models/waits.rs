//! Number of waits of the CPU for GPUs.

use moe_executor::cuda::Policy;
use moe_trace::record::{PHASE_GENERATE, lane};

use super::recording::record;
use super::{Case, MODELS, ONCE, TWICE, case, has_gpu, open};
use moe_testkit::Report;

/// With the entire model on GPUs, neither layers nor experts nor their records cause a wait. The CPU waits only for the logits and,
/// on each GPU, for the end of the pass.
#[test]
fn waits_only_for_logits_and_end_of_pass() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for ((name, _), gpus) in MODELS.into_iter().flat_map(|m| [(m, ONCE), (m, TWICE)]) {
        let on_gpus = Case {
            gpus,
            ..case(Policy::Gpu)
        };
        let expected = 1 + gpus.len() as u64;
        let recorded = record(&open(name), Some(&on_gpus), false);
        let waits: Vec<u64> = recorded.passes.iter().map(|pass| pass.waits).collect();
        println!("{name}, {} GPUs: waits of the passes {waits:?}", gpus.len());
        // The prompt allocates memory, and the first token grows the KV cache.
        let has_other_waits = waits[2..].iter().any(|&waits| waits != expected);
        let experts = recorded.records.iter().filter(|r| r.num_experts > 0);
        let elsewhere = experts.filter(|r| {
            let lanes = &r.expert_lane[..r.expert_ids().len()];
            r.phase == PHASE_GENERATE && lanes.iter().any(|&lane| lane != lane::GPU_RESIDENT)
        });
        let elsewhere = elsewhere.count();
        if has_other_waits || elsewhere > 0 || recorded.fallbacks.ops > 0 {
            report.fail(format!(
                "{name}, {} GPUs: waits of the passes {waits:?}, not {expected} in each from the third on; {elsewhere} records \
                 with experts not on a GPU; {:?}",
                gpus.len(),
                recorded.fallbacks
            ));
        }
    }
    report.finish();
}
