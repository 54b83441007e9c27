//! The scheduler with sessions of the executor.

use std::collections::BTreeMap;
use std::path::Path;

use moe_engine::{BatchSession, SamplerParams};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Model, Session};
use moe_gguf::Gguf;
use moe_server::generation::{Event, FinishReason, GenerationRequest};
use moe_server::metrics::MetricsSnapshot;
use moe_server::recent::RecentRequests;
use moe_server::recording::{Recording, RecordingParams};
use moe_server::scheduler::{Scheduler, SchedulerParams};
use moe_testkit::fixture;
use moe_trace::ModelInfo;
use moe_trace::tables::read_routing;

/// Prompts of different lengths.
fn prompts() -> [Vec<u32>; 5] {
    [
        (300..320).collect(),
        vec![7, 400, 33],
        (100..150).rev().collect(),
        vec![12],
        (40..61).collect(),
    ]
}

fn request(prompt: &[u32]) -> GenerationRequest {
    GenerationRequest {
        prompt: prompt.to_vec(),
        sampling: SamplerParams::default(),
        n_predict: Some(12),
        n_probs: Some(1),
        ignore_eos: true,
        deadline: None,
    }
}

/// Runs requests with `n_slots` slots and returns their tokens.
fn run(
    model: &Model,
    n_slots: usize,
    prompts: &[Vec<u32>],
    recording: Option<Recording>,
) -> (Vec<Vec<u32>>, MetricsSnapshot) {
    run_watched(
        model,
        n_slots,
        prompts,
        recording,
        RecentRequests::new(0, false),
    )
}

/// Like [`run`]. The requests are added to `recent`.
fn run_watched(
    model: &Model,
    n_slots: usize,
    prompts: &[Vec<u32>],
    recording: Option<Recording>,
    recent: RecentRequests,
) -> (Vec<Vec<u32>>, MetricsSnapshot) {
    let threads = Threads::new(2).unwrap();
    let cache = CacheParams::of_type(CacheType::F32, 128).with_sequences(n_slots);
    let mut session = Session::new(model, &threads, Recorder::new(None), cache).unwrap();
    let params = SchedulerParams {
        n_batch: 8,
        n_prompt_chunk: 5,
        n_queue: 8,
    };
    let scheduler = Scheduler::new(&session, params, recording).watch(recent);
    let handle = scheduler.handle();
    let submit = |prompt: &Vec<u32>| handle.submit(request(prompt)).unwrap();
    let receivers: Vec<_> = prompts.iter().map(submit).collect();
    handle.shutdown();
    scheduler.run(&mut session);
    for slot in 0..n_slots {
        assert_eq!(session.slot_len(slot).unwrap(), 0);
    }
    let tokens = receivers.into_iter().map(|mut receiver| {
        let mut tokens = Vec::new();
        while let Ok(event) = receiver.try_recv() {
            match event {
                Event::Token { token, top, .. } => {
                    assert_eq!(top.len(), 1);
                    tokens.push(token);
                }
                Event::Finished { reason, .. } => assert_eq!(reason, FinishReason::Length),
                Event::Failed(message) => panic!("{message}"),
            }
        }
        assert_eq!(tokens.len(), 12);
        tokens
    });
    (tokens.collect(), handle.metrics())
}

#[test]
fn requests_in_a_batch_have_the_tokens_that_they_have_alone() {
    for file in ["random-qwen3moe-F16.gguf", "random-gpt-oss-F16.gguf"] {
        let gguf = Gguf::open(fixture(file)).unwrap();
        let model = Model::load(&gguf).unwrap();
        let (together, metrics) = run(&model, 3, &prompts(), None);
        let (alone, alone_metrics) = run(&model, 1, &prompts(), None);
        assert_eq!(together, alone, "{file}");
        assert!(metrics.passes < alone_metrics.passes);
    }
}

/// The experts in a trace: by layer and position, best first.
fn experts(trace: &Path) -> BTreeMap<(u16, u32), Vec<u32>> {
    let mut experts = BTreeMap::<_, Vec<u32>>::new();
    for batch in read_routing(trace.join("routing.parquet")).unwrap() {
        let batch = batch.unwrap();
        for row in 0..batch.len() {
            let key = (batch.layer_id()[row], batch.token_id()[row]);
            experts.entry(key).or_default().push(batch.expert_id()[row]);
        }
    }
    experts
}

/// Traces of all requests, in their order.
fn traces(model: &Model, n_slots: usize) -> Vec<BTreeMap<(u16, u32), Vec<u32>>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("traces");
    let params = RecordingParams::new(path.clone(), ModelInfo::default());
    let recording = Recording::start(params, |error| panic!("{error}")).unwrap();
    let (_, metrics) = run(model, n_slots, &prompts(), Some(recording));
    assert_eq!((metrics.traces.written, metrics.traces.dropped), (5, 0));
    let entries = std::fs::read_dir(path).unwrap();
    let mut directories: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    directories.sort();
    directories.iter().map(|path| experts(path)).collect()
}

#[test]
fn a_trace_has_the_routing_of_its_request_only() {
    let gguf = Gguf::open(fixture("random-gpt-oss-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let together = traces(&model, 3);
    assert_eq!(together, traces(&model, 1));
    let hp = model.hparams();
    for (prompt, trace) in prompts().iter().zip(&together) {
        // The last of the 12 generated tokens is not evaluated.
        assert_eq!(trace.len(), hp.n_layer * (prompt.len() + 11));
        assert!(trace.values().all(|ids| ids.len() == hp.n_expert_used));
    }
}

#[test]
fn recent_requests_have_the_selections_of_their_tokens() {
    let gguf = Gguf::open(fixture("random-gpt-oss-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let recent = RecentRequests::new(8, true);
    let (tokens, _) = run_watched(&model, 3, &prompts(), None, recent.clone());
    let expected = traces(&model, 1);
    let hp = model.hparams();
    for (id, (prompt, generated)) in (0..).zip(prompts().iter().zip(&tokens)) {
        let requests = recent.list(Some(id));
        assert_eq!(requests.len(), 5);
        let request = requests.iter().find(|request| request.id == id).unwrap();
        assert_eq!(request.outcome, Some("length"));
        assert_eq!((request.n_prompt, request.n_generated), (prompt.len(), 12));
        assert_eq!(
            request.tokens,
            [prompt.as_slice(), generated.as_slice()].concat()
        );
        assert_eq!(request.selections.len(), hp.n_layer);
        let mut counts = BTreeMap::<(u16, u32), u64>::new();
        for ((layer, _), experts) in &expected[id as usize] {
            for &expert in experts {
                *counts.entry((*layer, expert)).or_default() += 1;
            }
        }
        for (&layer, selections) in &request.selections {
            for (expert, &n) in (0..).zip(selections) {
                let expected = counts.get(&(layer, expert)).copied();
                assert_eq!(n, expected.unwrap_or(0), "layer {layer}, expert {expert}");
            }
        }
    }
}
