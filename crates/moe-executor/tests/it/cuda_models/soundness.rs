//! Soundness of recorded runs for every combination of placement, policy and batch size.

use std::sync::atomic::AtomicBool;

use moe_engine::{Decode, Limits, Mode, Sampler, SamplerParams, generate};
use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Policy;
use moe_executor::cuda::post_fetch::Settings;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, DeviceId, Model, Session};
use moe_gguf::Gguf;
use moe_gguf::map::OffsetMap;
use moe_testkit::Report;
use moe_trace::{Manifest, Run, RunOptions, RunWriter, check};

use super::{Case, MODELS, RandomLanes, TWICE, case, has_gpu, open};

const PROMPTS: [&[u32]; 2] = [&[1, 17, 300, 42, 9, 250, 77], &[5, 6, 7]];

/// Placements of layers and matrices.
fn placements() -> Vec<Case> {
    let all = case(Policy::Gpu);
    let twice = Case { gpus: TWICE, ..all };
    let n_gpu_layers = |n_gpu_layers, placement| Case {
        n_gpu_layers,
        ..placement
    };
    let n_cpu_moe = |n_cpu_moe, placement| Case {
        n_cpu_moe,
        ..placement
    };
    let limited = |gpus, placement| Case { gpus, ..placement };
    let overrides = |overrides, placement| Case {
        overrides,
        ..placement
    };
    vec![
        all,
        n_cpu_moe(1, all),
        n_cpu_moe(usize::MAX, all),
        n_gpu_layers(0, n_cpu_moe(usize::MAX, all)),
        n_gpu_layers(1, all),
        n_gpu_layers(3, all),
        n_gpu_layers(3, n_cpu_moe(2, all)),
        limited(&[(0, Some(0.3))], all),
        limited(&[(0, Some(0.6))], n_cpu_moe(usize::MAX, all)),
        // The CPU computes the shared expert in parallel with the selected experts on the GPU.
        n_gpu_layers(0, overrides(&["_exps=CUDA0"], all)),
        overrides(
            &[
                "attn_k=CPU",
                "attn_output=CPU",
                "ffn_up_exps=CPU",
                "shexp=CPU",
            ],
            all,
        ),
        twice,
        n_cpu_moe(1, twice),
        n_gpu_layers(3, n_cpu_moe(usize::MAX, twice)),
        limited(&[(0, Some(0.1)), (0, Some(0.3)), (0, None)], all),
        // The experts of a layer are on the other GPU, or on both GPUs.
        overrides(&["blk.[13].ffn_.*_exps=CUDA0", "_exps=CUDA1"], twice),
        overrides(&["ffn_down_exps=CUDA0", "_exps=CUDA1", "shexp=CPU"], twice),
        n_gpu_layers(0, overrides(&["_exps=CUDA1", "attn_q=CUDA0"], twice)),
    ]
}

/// Policies with their settings, and the number of tokens from which weights are copied for a product.
fn policies() -> Vec<(Policy, Settings, Option<usize>)> {
    let default = Settings::default();
    let limited = |limit| Settings {
        cpu_limit: Some(limit),
        ..default
    };
    vec![
        (Policy::Cpu, default, Some(32)),
        (Policy::Gpu, default, Some(32)),
        (Policy::Gpu, default, Some(1)),
        (Policy::PostFetch, default, None),
        (Policy::PostFetch, limited(2), None),
        (
            Policy::PostFetch,
            Settings {
                block_on_miss: false,
                max_transfers: 1,
                ..limited(1)
            },
            Some(32),
        ),
        (
            Policy::PostFetch,
            Settings {
                dedicated_streams: false,
                ..default
            },
            None,
        ),
    ]
}

/// Records a run of both prompts, and returns the faults of the run.
fn faults(gguf: &Gguf, case: &Case, n_batch: usize, mode: Mode) -> Vec<String> {
    let model = Model::load(gguf).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let (map, options) = (OffsetMap::new(gguf), RunOptions::default());
    let writer = RunWriter::create(&run, Manifest::default(), &map, options).unwrap();
    let threads = Threads::new(2).unwrap();
    let devices = case.open(gguf, &model);
    let recorder = Recorder::new(Some(writer)).with_mode(mode);
    let mut session = Session::with_devices(
        &model,
        &threads,
        devices,
        recorder,
        CacheParams::of_type(CacheType::F32, 64),
    )
    .unwrap();
    case.prepare(&mut session);
    let limits = Limits {
        n_predict: 3,
        n_batch,
        ignore_eos: true,
    };
    for (sequence, prompt) in (0..).zip(PROMPTS) {
        session.begin_sequence(sequence);
        let interrupted = AtomicBool::new(false);
        let mut sampler = Sampler::new(SamplerParams::default());
        generate(
            &mut session,
            &mut sampler,
            prompt,
            &limits,
            &interrupted,
            |_| {},
        )
        .unwrap();
    }
    let (recorder, written) = session.into_recorder();
    written.unwrap();
    let writer = recorder.into_writer().unwrap();
    writer.finish().unwrap();
    let run = Run::open(&run).unwrap();
    let faults = check::check(&run);
    faults.iter().map(ToString::to_string).collect()
}

/// Hot caches with lanes on the GPUs and the CPU. The devices of all lanes are in the lists of all [`placements`] if
/// `is_twice`.
fn hot_caches(is_twice: bool) -> Vec<RandomLanes> {
    const ONE: &[DeviceId] = &[DeviceId::Gpu(0)];
    const MIXED: &[DeviceId] = &[DeviceId::Cpu, DeviceId::Gpu(0)];
    const TWO: &[DeviceId] = &[DeviceId::Gpu(1), DeviceId::Gpu(0), DeviceId::Cpu];
    let lanes = |devices, percent| RandomLanes { devices, percent };
    let mut all = vec![lanes(ONE, 40), lanes(ONE, 100), lanes(MIXED, 60)];
    if is_twice {
        all.extend([lanes(TWO, 60), lanes(TWO, 100)]);
    }
    all
}

/// Records a run of each case with batches of a number of tokens. The models alternate: 8 models and 3 batch sizes have no common
/// divisor, so that each model is tested with every case.
fn check_runs(cases: impl Iterator<Item = (Case, usize)>) {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    let models: Vec<Gguf> = MODELS.iter().map(|(name, _)| open(name)).collect();
    let mut n_runs = 0;
    for (case, n_batch) in cases {
        let model = n_runs % models.len();
        let mode = [Mode::All, Mode::Experts][usize::from(n_runs % 5 == 4)];
        n_runs += 1;
        let faults = faults(&models[model], &case, n_batch, mode);
        if !faults.is_empty() {
            let name = MODELS[model].0;
            report.fail(format!(
                "{name}, batches of {n_batch}, {mode:?}, {case:?}: {faults:?}"
            ));
        }
    }
    println!("testing: {n_runs} runs");
    report.finish();
}

#[test]
fn records_a_sound_run_with_every_hot_cache() {
    let policies = [
        (Policy::Cpu, None),
        (Policy::Cpu, Some(3)),
        (Policy::Gpu, None),
    ];
    let cases = placements().into_iter().flat_map(|placement| {
        let caches = hot_caches(placement.gpus.len() > 1).into_iter();
        caches.flat_map(move |hot| {
            policies.map(|(policy, min_batch)| Case {
                policy,
                min_batch,
                hot: Some(hot),
                ..placement
            })
        })
    });
    check_runs(cases.zip([1, 3, 512].into_iter().cycle()));
}

#[test]
fn records_a_sound_run_for_every_placement_policy_and_batch_size() {
    let cases = placements().into_iter().flat_map(|placement| {
        policies()
            .into_iter()
            .flat_map(move |(policy, post_fetch, min_batch)| {
                [1, 3, 512].map(|n_batch| {
                    let case = Case {
                        policy,
                        min_batch,
                        post_fetch,
                        ..placement
                    };
                    (case, n_batch)
                })
            })
    });
    check_runs(cases);
}
