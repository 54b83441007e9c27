//! A limited scratchpad: it receives as many experts as fit; the CPU computes the others.

use std::cell::RefCell;
use std::rc::Rc;

use moe_engine::{Decode, Logits};
use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Policy;
use moe_executor::cuda::post_fetch::State;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Model, Session};
use moe_trace::Phase;

use super::{Case, MODELS, case, down_size, has_gpu, open};
use moe_testkit::Report;

/// Post-Fetch with a scratchpad for this number of experts.
fn with_room_for(experts: f64) -> Case {
    Case {
        scratchpad: Some(experts),
        ..case(Policy::PostFetch)
    }
}

#[test]
fn experts_without_room_match_llama_cpp() {
    for experts in [1.5, 0.5] {
        with_room_for(experts).compare(&MODELS, &["python", "long"]);
    }
}

#[test]
fn transfers_as_many_experts_as_fit() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for (name, _) in MODELS {
        let gguf = open(name);
        let model = Model::load(&gguf).unwrap();
        let (n_layer, k) = (model.hparams().n_layer, model.hparams().n_expert_used);
        let sizes: Vec<usize> = (0..n_layer)
            .map(|il| down_size(&gguf, &model, il))
            .collect();
        let largest = sizes.iter().copied().max().unwrap_or(0);
        for experts in [1.5, 0.5] {
            let room = (experts * largest as f64) as usize;
            let mut devices = with_room_for(experts).open(&gguf, &model);
            let ready = Rc::new(RefCell::new(vec![0; n_layer]));
            let seen = ready.clone();
            devices.gpus_mut()[0].observe_transfers(Box::new(move |transfer| {
                seen.borrow_mut()[transfer.layer] += usize::from(transfer.state == State::GpuReady);
            }));
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

            let fits = |&size: &usize| room.checked_div(size).unwrap_or(0).min(k);
            let want: Vec<usize> = sizes.iter().map(fits).collect();
            let device = &session.devices().gpus()[0];
            let (ready, size) = (ready.borrow(), device.scratchpad_bytes());
            let text = format!(
                "{name}, room for {experts} experts of {largest} bytes: scratchpad of {size} bytes, {ready:?} of {k} experts \
                 transferred by layer; {:?}",
                device.fallbacks
            );
            println!("{text}");
            // An expert without room is not a failure.
            if *ready != want || size != room || device.fallbacks.ops > 0 {
                report.fail(format!("{text}; expected {room} bytes and {want:?}"));
            }
        }
    }
    report.finish();
}
