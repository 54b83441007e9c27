//! Number of waits of the CPU for GPUs.

use std::cell::Cell;
use std::rc::Rc;

use moe_engine::{BatchEntry, BatchSession};
use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Policy;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, Model, Session};
use moe_trace::Phase;
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

/// The observer of batches gets the routing of each layer when the pass has ended, without a wait of its own.
#[test]
fn observer_of_batches_adds_no_wait() {
    if !has_gpu() {
        return;
    }
    let gguf = open("random-gpt-oss-F16");
    let model = Model::load(&gguf).unwrap();
    let threads = Threads::new(1).unwrap();
    let devices = case(Policy::Gpu).open(&gguf, &model);
    let cache = CacheParams::new(64).with_sequences(2);
    let mut session =
        Session::with_devices(&model, &threads, devices, Recorder::new(None), cache).unwrap();
    let n_observed = Rc::new(Cell::new(0));
    let seen = n_observed.clone();
    session.set_observer(Some(Box::new(move |routed| {
        assert_eq!(
            routed.ids.len(),
            routed.positions.len() * routed.n_expert_used
        );
        assert_eq!(routed.weights.len(), routed.ids.len());
        seen.set(seen.get() + routed.positions.len());
    })));
    let n_layer = model.hparams().n_layer;
    for position in 0..8 {
        let entry = |slot| BatchEntry {
            slot,
            token: 5,
            position,
            phase: Phase::Generate,
            logits: true,
        };
        let waits = session.devices().gpus()[0].gpu().waits();
        session.decode_batch(&[0, 1].map(entry)).unwrap();
        let waits = session.devices().gpus()[0].gpu().waits() - waits;
        assert_eq!(n_observed.take(), 2 * n_layer, "position {position}");
        // The KV cache grows at powers of two.
        let grows = position == 0 || position.is_power_of_two();
        assert!(grows || waits == 2, "position {position}: {waits} waits");
    }
}
