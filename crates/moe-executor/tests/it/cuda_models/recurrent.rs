//! Models with recurrent states on a GPU, compared with the CPU: several sequences in a pass.

use moe_engine::{BatchEntry, BatchSession};
use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Policy;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Devices, Model, Session};
use moe_gguf::GgmlType;
use moe_testkit::Report;
use moe_trace::Phase;

use super::{Case, TWICE, case, has_gpu};
use crate::records::described;
use crate::slots::RECURRENT;

/// Runs passes of several sequences with one model; returns the logits of the last token of each sequence in each pass. Sequences start in
/// different passes, and one starts again. Prompts have one or two parts, and a pass may contain two parts of a sequence.
fn batches(model: &Model, devices: Devices) -> (Vec<Vec<f32>>, u64) {
    const PASSES: [&[(usize, usize)]; 6] = [
        &[(2, 20), (0, 3)],
        &[(2, 1), (0, 1)],
        &[(1, 9), (2, 1), (0, 30)],
        &[(0, 5), (1, 1), (2, 1)],
        &[(2, 1), (0, 2), (2, 2)],
        &[(0, 1), (1, 1), (2, 1)],
    ];
    /// Before this pass, slot 0 starts another sequence.
    const RESTART: usize = 3;
    let threads = Threads::new(2).unwrap();
    let cache = CacheParams::of_type(CacheType::F32, 128).with_sequences(3);
    let recorder = Recorder::new(None);
    let mut session = Session::with_devices(model, &threads, devices, recorder, cache).unwrap();
    let n_vocab = model.hparams().n_vocab;
    let mut logits = Vec::new();
    for (pass, runs) in PASSES.into_iter().enumerate() {
        if pass == RESTART {
            session.begin_slot(0, 7).unwrap();
        }
        let mut ends = [0, 1, 2].map(|slot| session.slot_len(slot).unwrap());
        let mut batch = Vec::new();
        for &(slot, n) in runs {
            for i in 0..n {
                let position = ends[slot];
                ends[slot] += 1;
                batch.push(BatchEntry {
                    slot,
                    token: ((31 * position + 7 * slot + pass) % (n_vocab - 10)) as u32 + 5,
                    position,
                    phase: Phase::Prompt,
                    logits: i + 1 == n,
                });
            }
        }
        let rows = session.decode_batch(&batch).unwrap();
        logits.extend(rows.chunks_exact(n_vocab).map(<[f32]>::to_vec));
    }
    let gpus = session.devices().gpus().iter();
    (logits, gpus.map(|gpu| gpu.fallbacks.ops).sum())
}

#[test]
fn sequences_of_recurrent_models_agree_with_the_cpu() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for arch in RECURRENT {
        let gguf = described::model(&described::description(arch), GgmlType::F32);
        let model = Model::load(&gguf).unwrap();
        let (expected, _) = batches(&model, Devices::cpu());
        for case in [
            case(Policy::Gpu),
            Case {
                gpus: TWICE,
                ..case(Policy::Gpu)
            },
        ] {
            let (actual, n_fallbacks) = batches(&model, case.open(&gguf, &model));
            assert_eq!(actual.len(), expected.len());
            let pairs = expected.iter().flatten().zip(actual.iter().flatten());
            let differences = pairs.map(|(a, b)| f64::from((a - b).abs()));
            let mean = differences.sum::<f64>() / expected.iter().flatten().count() as f64;
            let is_close = mean <= 0.02;
            if !is_close || n_fallbacks > 0 {
                report.fail(format!(
                    "{arch}: mean difference of the logits {mean:.5}, {n_fallbacks} operations fell back to the CPU; {case:?}"
                ));
            }
        }
    }
    report.finish();
}
