//! Passes that are started as CUDA graphs.

use moe_engine::{Decode, Logits};
use moe_executor::cpu::threads::Threads;
use moe_executor::cuda::Policy;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, Model, Session};
use moe_gguf::Gguf;
use moe_testkit::Report;
use moe_trace::Phase;

use super::{Case, MODELS, ONCE, TWICE, case, has_gpu, open};

/// More positions than one split of attention has, so that arguments and grids of kernels change.
const N_GENERATED: u32 = 150;

/// Logits of each pass, and the number of graphs that were started.
fn logits(gguf: &Gguf, case: &Case, uses_graphs: bool) -> (Vec<Vec<u32>>, u64) {
    let model = Model::load(gguf).unwrap();
    let threads = Threads::new(1).unwrap();
    let mut devices = case.open(gguf, &model);
    devices.use_graphs(uses_graphs);
    let cache = CacheParams::new(512);
    let mut session =
        Session::with_devices(&model, &threads, devices, Recorder::new(None), cache).unwrap();
    let prompt: Vec<u32> = (300..320).collect();
    let mut all = Vec::new();
    for sequence in 0..2 {
        session.begin_sequence(sequence);
        session
            .decode(&prompt, Phase::Prompt, Logits::None)
            .unwrap();
        for i in 0..N_GENERATED {
            let token = (7 * i + sequence) % 200 + 10;
            let row = session.decode(&[token], Phase::Generate, Logits::Last);
            all.push(row.unwrap().iter().map(|x| x.to_bits()).collect());
        }
    }
    let n_graphs = session
        .devices()
        .gpus()
        .iter()
        .map(|gpu| gpu.gpu().n_graphs());
    (all, n_graphs.sum())
}

#[test]
fn graphs_yield_the_logits_of_single_launches() {
    if !has_gpu() {
        return;
    }
    let mut report = Report::default();
    for ((name, _), gpus) in MODELS.into_iter().flat_map(|m| [(m, ONCE), (m, TWICE)]) {
        let on_gpus = Case {
            gpus,
            ..case(Policy::Gpu)
        };
        let gguf = open(name);
        let (with, started) = logits(&gguf, &on_gpus, true);
        let (without, none) = logits(&gguf, &on_gpus, false);
        let different = with.iter().zip(&without).position(|(a, b)| a != b);
        println!("{name}, {} GPUs: {started} graphs", gpus.len());
        // A pass that repeats another one starts at least one graph on each GPU.
        let expected = 2 * u64::from(N_GENERATED - 10) * gpus.len() as u64;
        if different.is_some() || started < expected || none != 0 {
            report.fail(format!(
                "{name}, {} GPUs: the first pass with other logits is {different:?}; {started} graphs, at least {expected} \
                 expected; {none} without graphs",
                gpus.len()
            ));
        }
    }
    report.finish();
}

/// Layers on the CPU: kernels are not collected, because the CPU computes next to them.
#[test]
fn models_that_are_partly_on_the_cpu_use_no_graphs() {
    if !has_gpu() {
        return;
    }
    let partly = Case {
        n_cpu_moe: 1,
        ..case(Policy::Gpu)
    };
    let gguf = open("random-gpt-oss-F16");
    assert_eq!(logits(&gguf, &partly, true).1, 0);
}
