//! The scheduler with a session whose logits are computed from the tokens of a sequence.

use std::time::Duration;

use moe_engine::{CacheUpdate, Error, Observer, Result, SamplerParams};
use moe_placement::LayerId;
use moe_placement::learn::LearnFile;
use moe_placement::perf::{Counters, LaneIndex, LayerCall, PerfMode, SharedCounters};
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;
use crate::generation::GenerationRequest;
use crate::metrics::MetricsSnapshot;

const N_VOCAB: usize = 50;
const N_CTX: usize = 64;
/// The end-of-generation token.
const EOG: u32 = 7;

/// The next token of a sequence is a function of all its tokens.
fn next_token(tokens: &[u32]) -> u32 {
    let hash = |sum: u32, &token: &u32| sum.wrapping_mul(31).wrapping_add(token);
    let next = tokens.iter().fold(17, hash) % N_VOCAB as u32;
    if next == EOG { next + 1 } else { next }
}

/// The greedy continuation of a prompt by `n` tokens.
fn continuation(prompt: &[u32], n: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..n {
        tokens.push(next_token(&tokens));
    }
    tokens.split_off(prompt.len())
}

/// A callback before each pass, with its number.
type BeforePass<'a> = Box<dyn FnMut(usize) -> Result<()> + 'a>;

struct FakeSession<'a> {
    slots: Vec<Vec<u32>>,
    batches: Vec<Vec<BatchEntry>>,
    logits: Vec<f32>,
    before_pass: BeforePass<'a>,
    updates: usize,
    /// Counts one expert selection of each token: in the first hot lane for even tokens, else in the cold lane.
    counters: SharedCounters,
    /// The next token after this number of tokens is the end-of-generation token.
    end_at: Option<usize>,
}

impl<'a> FakeSession<'a> {
    fn new(n_slots: usize) -> FakeSession<'a> {
        FakeSession {
            slots: vec![Vec::new(); n_slots],
            batches: Vec::new(),
            logits: Vec::new(),
            before_pass: Box::new(|_| Ok(())),
            updates: 0,
            counters: SharedCounters::new(Counters::new(PerfMode::Update, 1, 1)),
            end_at: None,
        }
    }
}

impl BatchSession for FakeSession<'_> {
    fn n_slots(&self) -> usize {
        self.slots.len()
    }

    fn n_ctx(&self) -> usize {
        N_CTX
    }

    fn n_vocab(&self) -> usize {
        N_VOCAB
    }

    fn is_eog(&self, token: u32) -> bool {
        token == EOG
    }

    fn slot_len(&self, slot: usize) -> Result<usize> {
        Ok(self.slots[slot].len())
    }

    fn begin_slot(&mut self, slot: usize, _: u32) -> Result<()> {
        assert!(self.slots[slot].is_empty(), "slot {slot} is not empty");
        Ok(())
    }

    fn truncate_slot(&mut self, slot: usize, n_past: usize) -> Result<()> {
        self.slots[slot].truncate(n_past);
        Ok(())
    }

    fn decode_batch(&mut self, entries: &[BatchEntry]) -> Result<&[f32]> {
        let number = self.batches.len();
        self.batches.push(entries.to_vec());
        (self.before_pass)(number)?;
        self.logits.clear();
        for entry in entries {
            let lane = [LaneIndex::Hot0, LaneIndex::Cold][entry.token as usize % 2];
            self.counters.lock().add_call(&LayerCall {
                layer: LayerId(0),
                ids: &[0],
                lanes: &[lane],
                times: None,
            });
            let tokens = &mut self.slots[entry.slot];
            assert_eq!(entry.position, tokens.len());
            tokens.push(entry.token);
            assert!(tokens.len() <= N_CTX);
            if entry.logits {
                let ends = self.end_at == Some(tokens.len());
                let best = if ends { EOG } else { next_token(tokens) };
                let row = (0..N_VOCAB as u32).map(|token| if token == best { 3.0 } else { 0.0 });
                self.logits.extend(row);
            }
        }
        Ok(&self.logits)
    }

    fn set_observer(&mut self, _: Option<Observer<'static>>) {}

    fn between_requests(&mut self) -> usize {
        self.updates += 1;
        self.counters.lock().reset();
        2
    }

    fn update_cache(&mut self, _: &LearnFile) -> Option<Result<CacheUpdate>> {
        Some(Ok(CacheUpdate {
            exchanged: 5,
            ..CacheUpdate::default()
        }))
    }

    fn counters(&self) -> Option<SharedCounters> {
        Some(self.counters.clone())
    }
}

fn request(prompt: &[u32], n_predict: usize) -> GenerationRequest {
    GenerationRequest {
        prompt: prompt.to_vec(),
        sampling: SamplerParams::default(),
        n_predict: Some(n_predict),
        n_probs: None,
        ignore_eos: false,
        deadline: None,
    }
}

fn params(n_batch: usize, n_prompt_chunk: usize, n_queue: usize) -> SchedulerParams {
    SchedulerParams {
        n_batch,
        n_prompt_chunk,
        n_queue,
    }
}

/// All events of a request that has ended: its tokens, and how it ended.
fn events(mut receiver: UnboundedReceiver<Event>) -> (Vec<u32>, Result<FinishReason, String>) {
    let mut tokens = Vec::new();
    loop {
        match receiver.try_recv() {
            Ok(Event::Token { token, .. }) => tokens.push(token),
            Ok(Event::Finished { reason, usage }) => {
                assert_eq!(usage.n_generated, tokens.len());
                return (tokens, Ok(reason));
            }
            Ok(Event::Failed(message)) => return (tokens, Err(message)),
            Err(error) => panic!("the request has not ended: {error}"),
        }
    }
}

/// Runs requests that were submitted before.
fn run(scheduler: Scheduler, session: &mut FakeSession) -> MetricsSnapshot {
    let handle = scheduler.handle();
    handle.shutdown();
    scheduler.run(session);
    handle.metrics()
}

#[test]
fn requests_in_a_batch_have_the_tokens_that_they_have_alone() {
    let mut session = FakeSession::new(3);
    let scheduler = Scheduler::new(&session, params(4, 2, 8), None);
    let prompts: Vec<Vec<u32>> = (0..7).map(|i| (i..i + 1 + i * 3).collect()).collect();
    let submit = |prompt: &Vec<u32>| scheduler.handle().submit(request(prompt, 9)).unwrap();
    let receivers: Vec<_> = prompts.iter().map(submit).collect();
    let metrics = run(scheduler, &mut session);
    for (prompt, receiver) in prompts.iter().zip(receivers) {
        let expected = (continuation(prompt, 9), Ok(FinishReason::Length));
        assert_eq!(events(receiver), expected);
    }
    let n_prompt: usize = prompts.iter().map(Vec::len).sum();
    assert_eq!(metrics.prompt_tokens, n_prompt as u64);
    assert_eq!(metrics.generated_tokens, 7 * 9);
    assert_eq!(metrics.requests, [("length", 7)].into());
    assert_eq!(metrics.first_token_time.count(), 7);
    assert_eq!(metrics.token_time.count(), 7 * 8);
    assert_eq!(metrics.request_time.count(), 7);
    assert_eq!(metrics.passes, session.batches.len() as u64);
    assert_eq!(metrics.cache_updates, session.updates as u64);
    assert_eq!(metrics.exchanged_experts, 2 * session.updates as u64);
    // The updates restarted the counters of the session, but not those of the scheduler.
    let tokens = || session.batches.iter().flatten().map(|entry| entry.token);
    let [n_even, n_odd] = [0, 1].map(|rest| tokens().filter(|token| token % 2 == rest).count());
    assert!(session.updates > 1 && n_even > 0);
    assert_eq!(metrics.selections, [n_even as u64, 0, 0, n_odd as u64]);
    assert!(session.batches.iter().all(|batch| batch.len() <= 4));
}

/// One sequence generates while the prompt of another is evaluated in chunks.
#[test]
fn generated_tokens_have_priority_over_prompts() {
    let mut session = FakeSession::new(2);
    let scheduler = Scheduler::new(&session, params(8, 3, 8), None);
    let long: Vec<u32> = (0..10).collect();
    let receivers = [request(&[1], 6), request(&long, 2)]
        .map(|request| scheduler.handle().submit(request).unwrap());
    run(scheduler, &mut session);
    let sizes = |slot| -> Vec<usize> {
        let of_slot = |batch: &Vec<BatchEntry>| batch.iter().filter(|e| e.slot == slot).count();
        session.batches.iter().map(of_slot).collect()
    };
    assert_eq!(sizes(0), [1, 1, 1, 1, 1, 1]);
    // Without generated tokens in the pass, 7 tokens are free; with them, at most 3 are used.
    assert_eq!(sizes(1), [7, 3, 1, 0, 0, 0]);
    for receiver in receivers {
        assert_eq!(events(receiver).1, Ok(FinishReason::Length));
    }
}

#[test]
fn a_dropped_receiver_frees_the_slot_for_the_next_request() {
    let mut session = FakeSession::new(1);
    let scheduler = Scheduler::new(&session, params(8, 8, 8), None);
    let handle = scheduler.handle();
    // The first one runs, the second one waits.
    let mut abandoned = vec![
        handle.submit(request(&[1, 2], 50)).unwrap(),
        handle.submit(request(&[5], 50)).unwrap(),
    ];
    let last = handle.submit(request(&[3], 2)).unwrap();
    session.before_pass = Box::new(move |pass| {
        if pass == 3 {
            abandoned.clear();
        }
        Ok(())
    });
    let metrics = run(scheduler, &mut session);
    assert_eq!(
        events(last),
        (continuation(&[3], 2), Ok(FinishReason::Length))
    );
    assert_eq!(metrics.requests, [("cancelled", 2), ("length", 1)].into());
    assert_eq!(session.batches.len(), 4 + 2);
    assert_eq!(session.slots, [[0u32; 0]]);
}

#[test]
fn rejects_requests_that_cannot_be_queued() {
    let session = FakeSession::new(2);
    let scheduler = Scheduler::new(&session, params(8, 8, 1), None);
    let handle = scheduler.handle();
    let submit = |prompt: &[u32]| handle.submit(request(prompt, 1)).err();
    assert_eq!(submit(&[]), Some(SubmitError::EmptyPrompt));
    let (n_prompt, n_ctx, n_vocab) = (N_CTX, N_CTX, N_VOCAB);
    let too_long = SubmitError::PromptTooLong { n_prompt, n_ctx };
    assert_eq!(submit(&[1; N_CTX]), Some(too_long));
    let unknown = SubmitError::TokenOutOfRange { token: 50, n_vocab };
    assert_eq!(submit(&[1, 50]), Some(unknown));
    // Two slots and one place in the queue.
    let accepted = [1, 2, 3].map(|token| handle.submit(request(&[token], 1)).unwrap());
    assert_eq!(submit(&[4]), Some(SubmitError::QueueFull));
    handle.shutdown();
    assert_eq!(submit(&[4]), Some(SubmitError::ShuttingDown));
    assert_eq!(handle.metrics().requests, [("rejected", 5)].into());
    assert_eq!(handle.metrics().n_queued, 3);
    // The scheduler does not run: the accepted requests fail.
    drop(scheduler);
    for receiver in accepted {
        assert!(events(receiver).1.is_err());
    }
    assert_eq!(handle.with_session(|_| ()), Err(Stopped));
}

/// The scheduler only runs between passes, which may take seconds.
#[test]
fn a_client_that_is_gone_frees_its_place_in_the_queue() {
    let mut session = FakeSession::new(1);
    let scheduler = Scheduler::new(&session, params(8, 8, 1), None);
    let handle = scheduler.handle();
    let submit = |token| handle.submit(request(&[token], 1));
    let [first, second] = [1, 2].map(|token| submit(token).unwrap());
    assert_eq!(submit(3).err(), Some(SubmitError::QueueFull));
    drop(first);
    let third = submit(3).unwrap();
    assert_eq!(submit(4).err(), Some(SubmitError::QueueFull));
    let metrics = run(scheduler, &mut session);
    for (receiver, prompt) in [(second, 2), (third, 3)] {
        assert_eq!(events(receiver).0, continuation(&[prompt], 1));
    }
    let outcomes = [("cancelled", 1), ("length", 2), ("rejected", 2)];
    assert_eq!(metrics.requests, outcomes.into());
}

#[test]
fn a_failed_pass_fails_its_requests_only() {
    let mut session = FakeSession::new(2);
    let scheduler = Scheduler::new(&session, params(4, 4, 8), None);
    let handle = scheduler.handle();
    // The second prompt has no room in the first pass.
    let failing = handle.submit(request(&[1, 2, 3, 4], 5)).unwrap();
    let other = handle.submit(request(&[9, 8], 3)).unwrap();
    let next = handle.submit(request(&[6], 3)).unwrap();
    session.before_pass = Box::new(|pass| match pass {
        0 => Err(Error::engine("the device failed")),
        _ => Ok(()),
    });
    let metrics = run(scheduler, &mut session);
    let (tokens, end) = events(failing);
    assert_eq!((tokens, end), (vec![], Err("the device failed".to_owned())));
    for (receiver, prompt) in [(other, &[9, 8][..]), (next, &[6])] {
        let expected = (continuation(prompt, 3), Ok(FinishReason::Length));
        assert_eq!(events(receiver), expected);
    }
    assert_eq!(metrics.requests, [("failed", 1), ("length", 2)].into());
    assert_eq!(metrics.failed_passes, 1);
}

#[test]
fn requests_end_at_the_limits_of_context_and_time_and_at_the_end_token() {
    let mut session = FakeSession::new(4);
    let scheduler = Scheduler::new(&session, params(256, 256, 8), None);
    let handle = scheduler.handle();
    let prompt: Vec<u32> = (0..N_CTX as u32 - 3).map(|i| i % 40).collect();
    let full = handle
        .submit(GenerationRequest {
            n_predict: None,
            ..request(&prompt, 0)
        })
        .unwrap();
    let late = handle
        .submit(GenerationRequest {
            deadline: Some(Instant::now() - Duration::from_secs(1)),
            ..request(&[1], 4)
        })
        .unwrap();
    let ended = handle.submit(request(&[2], 40)).unwrap();
    let ignored = handle
        .submit(GenerationRequest {
            ignore_eos: true,
            ..request(&[3], 6)
        })
        .unwrap();
    let nothing = handle.submit(request(&[4, 5], 0)).unwrap();
    session.end_at = Some(4);
    run(scheduler, &mut session);
    assert_eq!(
        events(full),
        (continuation(&prompt, 3), Ok(FinishReason::ContextFull))
    );
    assert_eq!(events(late), (vec![], Ok(FinishReason::TimeLimit)));
    assert_eq!(
        events(ended),
        (continuation(&[2], 3), Ok(FinishReason::EndOfGeneration))
    );
    let (tokens, end) = events(ignored);
    assert_eq!(
        (tokens.len(), tokens[3], end),
        (6, EOG, Ok(FinishReason::Length))
    );
    assert_eq!(events(nothing), (vec![], Ok(FinishReason::Length)));
}

#[test]
fn reports_the_probabilities_of_the_logits() {
    let mut session = FakeSession::new(1);
    let scheduler = Scheduler::new(&session, params(8, 8, 8), None);
    let request = GenerationRequest {
        n_probs: Some(2),
        ..request(&[1], 1)
    };
    let mut receiver = scheduler.handle().submit(request).unwrap();
    run(scheduler, &mut session);
    let Ok(Event::Token {
        token,
        logprob,
        top,
    }) = receiver.try_recv()
    else {
        panic!("no token");
    };
    let p = 3f32.exp() / (3f32.exp() + (N_VOCAB - 1) as f32);
    let logprob = logprob.unwrap();
    assert!((logprob - p.ln()).abs() < 1e-5);
    assert_eq!(top.len(), 2);
    assert_eq!((top[0].token, top[0].logprob), (token, logprob));
    assert!(top[1].logprob < logprob);
}

/// The scheduler sleeps until the first request, runs commands, and completes running and queued requests after the shutdown.
#[test]
fn shutdown_completes_accepted_requests() {
    let (send, handles) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut session = FakeSession::new(2);
        let scheduler = Scheduler::new(&session, params(8, 8, 64), None);
        send.send(scheduler.handle()).unwrap();
        scheduler.run(&mut session);
        session.batches.len()
    });
    let handle = handles.recv().unwrap();
    assert_eq!(handle.with_session(|session| session.n_slots()), Ok(2));
    let learn = r#"{"schema": "llama.cpp.moe_layer_opt_perf.v1", "layers": []}"#;
    let updated = handle.update_cache(LearnFile::parse(learn).unwrap());
    assert_eq!(updated.unwrap().unwrap().unwrap().exchanged, 5);
    let metrics = handle.metrics();
    assert_eq!((metrics.cache_updates, metrics.exchanged_experts), (1, 5));
    let mut receivers: Vec<_> = (0..20)
        .map(|i| handle.submit(request(&[i, i + 1], 12)).unwrap())
        .collect();
    // A request has started.
    let first = receivers[0].blocking_recv();
    assert!(matches!(first, Some(Event::Token { .. })));
    handle.shutdown();
    assert_eq!(
        handle.submit(request(&[1], 1)).err(),
        Some(SubmitError::ShuttingDown)
    );
    assert!(thread.join().unwrap() > 0);
    for (i, receiver) in receivers.into_iter().enumerate().skip(1) {
        let prompt = [i as u32, i as u32 + 1];
        assert_eq!(
            events(receiver),
            (continuation(&prompt, 12), Ok(FinishReason::Length))
        );
    }
    assert_eq!(
        handle.metrics().requests,
        [("length", 20), ("rejected", 1)].into()
    );
    assert_eq!(handle.metrics().n_running, 0);
}

/// A panic of the session must not leave requests without an answer.
#[test]
fn requests_fail_if_the_scheduler_panics() {
    let mut session = FakeSession::new(1);
    let scheduler = Scheduler::new(&session, params(8, 8, 8), None);
    let handle = scheduler.handle();
    let receivers = [1, 2].map(|token| handle.submit(request(&[token], 5)).unwrap());
    session.before_pass = Box::new(|_| panic!("test"));
    let run = std::panic::AssertUnwindSafe(|| scheduler.run(&mut session));
    assert!(handle.is_accepting());
    assert!(std::panic::catch_unwind(run).is_err());
    assert!(!handle.is_accepting());
    for receiver in receivers {
        assert!(events(receiver).1.is_err());
    }
    assert_eq!(
        handle.submit(request(&[1], 1)).err(),
        Some(SubmitError::ShuttingDown)
    );
}
