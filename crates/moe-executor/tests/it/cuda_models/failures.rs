//! Failed operations of Post-Fetch: the CPU computes them, they are counted, and records contain them.

use std::cell::RefCell;
use std::rc::Rc;

use moe_engine::{Decode, Logits};
use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Policy;
use moe_executor::cuda::post_fetch::{InjectedFault, Settings, State};
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Model, Session};
use moe_trace::Phase;
use moe_trace::record::{FLAG_CPU_FALLBACK, lane};

use super::recording::{distinct, record, stem};
use super::{Case, case, has_gpu, open};
use moe_testkit::Report;

/// Post-Fetch with an injected failure.
pub fn failing(fault: InjectedFault) -> Case {
    Case {
        post_fetch: Settings {
            fault: Some(fault),
            ..Settings::default()
        },
        ..case(Policy::PostFetch)
    }
}

#[test]
fn every_failure_is_counted_and_recorded() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for name in ["tiny-gpt-oss-MXFP4", "tiny-qwen3moe-Q4_K_M"] {
        let gguf = open(name);
        let n_layer = Model::load(&gguf).unwrap().hparams().n_layer;
        for fault in [
            InjectedFault::Alloc,
            InjectedFault::Copy,
            InjectedFault::LaterCopy,
            InjectedFault::Kernel,
        ] {
            let what = format!("{name}, {fault:?}");
            let recorded = record(&gguf, Some(&failing(fault)), true);
            // One error per layer and pass.
            let fallbacks = &recorded.fallbacks;
            let want = n_layer * recorded.passes.len();
            let is_injected = |first: &String| first.ends_with("a test injected the error");
            println!("{what}: {fallbacks:?}");
            if fallbacks.ops != want as u64 || !fallbacks.first.as_ref().is_some_and(is_injected) {
                report.fail(format!(
                    "{what}: {fallbacks:?}, not {want} injected failures"
                ));
            }
            let mut wrong = Vec::new();
            let mut n_down = 0;
            for pass in &recorded.passes {
                let records = pass.of(&recorded.records);
                for down in records.filter(|r| stem(r) == "ffn_moe_down") {
                    n_down += 1;
                    let selected = distinct(&recorded.observed, down.layer_id.get(), pass);
                    // `LaterCopy` does not affect the first transfer of a layer.
                    let lane = |id: i32| {
                        if fault == InjectedFault::LaterCopy && id == selected[0] {
                            lane::POST_FETCHED
                        } else {
                            lane::POST_FETCH_MISS
                        }
                    };
                    let ids: Vec<i32> = down.expert_ids().iter().map(|id| id.get()).collect();
                    let want: Vec<u8> = ids.iter().map(|&id| lane(id)).collect();
                    let have = &down.expert_lane[..ids.len()];
                    if !down.has_flag(FLAG_CPU_FALLBACK) || have != want {
                        wrong.push(format!(
                            "{} of position {}: experts {ids:?}, flags {:#b}, lanes {have:?}, not {want:?}",
                            down.dst_name(),
                            down.token_id.get(),
                            down.flags
                        ));
                    }
                }
            }
            if n_down < want || !wrong.is_empty() {
                let (n, first) = (wrong.len(), wrong.first());
                report.fail(format!(
                    "{what}: {n} of {n_down} down records are wrong; the first: {first:?}"
                ));
            }
        }
    }
    report.finish();
}

/// Only the first transfer of each layer is started; the failure of the others is reported.
#[test]
fn uses_started_copies_and_reports_failed_ones() {
    if !has_gpu() {
        return;
    }
    let gguf = open("tiny-qwen3moe-Q4_K_M");
    let model = Model::load(&gguf).unwrap();
    let (n_layer, k) = (model.hparams().n_layer, model.hparams().n_expert_used);
    let failing = failing(InjectedFault::LaterCopy);
    let mut devices = failing.open(&gguf, &model);
    let events = Rc::new(RefCell::new(Vec::new()));
    let seen = events.clone();
    devices.gpus_mut()[0]
        .observe_transfers(Box::new(move |transfer| seen.borrow_mut().push(transfer)));
    let (threads, recorder) = (Threads::new(2).unwrap(), Recorder::new(None));
    let mut session = Session::with_devices(
        &model,
        &threads,
        devices,
        recorder,
        CacheParams::of_type(CacheType::F32, 8),
    )
    .unwrap();
    session.decode(&[1], Phase::Prompt, Logits::Last).unwrap();

    let fallbacks = &session.devices().gpus()[0].fallbacks;
    assert_eq!(fallbacks.ops, n_layer as u64, "one error per layer");
    let first = fallbacks.first.as_deref();
    assert_eq!(first, Some("a transfer failed: a test injected the error"));
    let events = events.borrow();
    let count = |state| events.iter().filter(|t| t.state == state).count();
    assert_eq!(count(State::CopyInFlight), n_layer * k);
    assert_eq!(count(State::GpuReady), n_layer);
    assert_eq!(count(State::CpuOnly), n_layer * (k - 1));
}
