//! Models of the architectures in `fixtures/architectures` on a GPU, compared with the CPU.

use moe_engine::{BatchEntry, BatchSession};
use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Policy;
use moe_executor::recorder::Recorder;
use moe_executor::{Architecture, CacheParams, CacheType, Devices, Model, Session};
use moe_gguf::{GgmlType, Gguf};
use moe_testkit::Report;
use moe_trace::Phase;

use super::{Case, TWICE, case, has_gpu};
use crate::records::described;
use crate::reference::{ModelRun, Open, Prepare, Reference, as_is, host, run};
use crate::slots::RECURRENT;

/// Tokens of the prompt and after it.
const N_TOKENS: usize = 70;
const N_GENERATED: usize = 24;

fn reference(n_vocab: usize) -> Reference {
    let token = |i: usize| (7 * i + i * i) as u32 % (n_vocab as u32 - 10) + 5;
    Reference {
        prompt: String::new(),
        prompt_tokens: (0..N_TOKENS).map(token).collect(),
        generated_tokens: (N_TOKENS..N_TOKENS + N_GENERATED).map(token).collect(),
        text: String::new(),
        top5_logits_per_generated_position: Vec::new(),
        expert_ids_by_layer: Vec::new(),
        overrides: Default::default(),
        tensors: Default::default(),
    }
}

/// How a run on a GPU differs from that on the CPU, if it is outside the bounds of F16 models.
fn outside(cpu: &ModelRun, gpu: &ModelRun) -> Option<String> {
    let best = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]));
    let pairs = || cpu.logits.iter().zip(&gpu.logits);
    let other_top1 = pairs().filter(|(a, b)| best(a) != best(b)).count();
    let mut difference = 0.0;
    for (a, b) in pairs() {
        let mut order: Vec<usize> = (0..a.len()).collect();
        order.sort_by(|&i, &j| a[j].total_cmp(&a[i]));
        difference += order[..5]
            .iter()
            .map(|&i| f64::from((a[i] - b[i]).abs()))
            .sum::<f64>();
    }
    let difference = difference / (5 * cpu.logits.len()) as f64;
    let sorted = |ids: &[i32]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    let rows = cpu.routed.iter().flatten().zip(gpu.routed.iter().flatten());
    let (mut n, mut other) = (0, 0);
    for (a, b) in rows {
        n += 1;
        other += usize::from(sorted(&a.ids) != sorted(&b.ids));
    }
    let same_rows = cpu.routed.iter().flatten().count() == gpu.routed.iter().flatten().count();
    let is_within = other_top1 == 0 && difference <= 0.02 && 100 * other <= n && same_rows;
    (!is_within).then(|| {
        format!(
            "{other_top1} of {} other best tokens, mean difference of the top five logits {difference:.5}, {other} of {n} other \
             sets of experts, {:?}",
            cpu.logits.len(),
            gpu.wrong
        )
    })
}

#[test]
fn described_models_agree_with_the_cpu() {
    if !has_gpu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut report = Report::default();
    let mut n_models = 0;
    for path in described::models(dir.path()) {
        let gguf = Gguf::open(&path).unwrap();
        let model = Model::load(&gguf).unwrap();
        let arch = path.file_stem().unwrap().to_str().unwrap();
        let runs_on_gpu = |known: &Architecture| known.name == arch && known.runs_on_gpu;
        if !moe_executor::architectures().any(|known| runs_on_gpu(&known)) {
            continue;
        }
        n_models += 1;
        let reference = reference(model.hparams().n_vocab);
        let on_cpu: (Open, Prepare) = (&host, &as_is);
        let expected = run(&model, &reference, 64, on_cpu, &|_| None);
        let cpu_moe = |policy| Case {
            n_cpu_moe: usize::MAX,
            ..case(policy)
        };
        let cases = [
            case(Policy::Gpu),
            cpu_moe(Policy::Cpu),
            cpu_moe(Policy::Gpu),
            cpu_moe(Policy::PostFetch),
        ];
        for case in cases {
            for batch in [1, 7, 64] {
                let open: Open = &|gguf, model| case.open(gguf, model);
                let prepare: Prepare = &|session| case.prepare(session);
                let fell_back = |devices: &moe_executor::Devices| {
                    let n: u64 = devices.gpus().iter().map(|gpu| gpu.fallbacks.ops).sum();
                    (n > 0).then(|| format!("{n} operations fell back to the CPU"))
                };
                let actual = run(&model, &reference, batch, (open, prepare), &fell_back);
                if let Some(wrong) = outside(&expected, &actual).or(actual.wrong) {
                    report.fail(format!("{arch}, batches of {batch}: {wrong}; {case:?}"));
                }
            }
        }
    }
    assert!(n_models >= 7, "{n_models}");
    println!("{n_models} architectures");
    report.finish();
}

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
        let runs_on_gpu = |known: &Architecture| known.name == arch && known.runs_on_gpu;
        if !moe_executor::architectures().any(|known| runs_on_gpu(&known)) {
            continue;
        }
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
