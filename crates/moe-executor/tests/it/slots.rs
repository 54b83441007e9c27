//! Several sequences in one session, and the types of the KV cache.

use moe_engine::{Decode, Logits};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Error, Model, Session};
use moe_gguf::Gguf;
use moe_testkit::fixture;
use moe_trace::Phase;

const N_CTX: usize = 256;

fn session<'a, 'g>(
    model: &'a Model<'g>,
    threads: &'a Threads,
    cache: CacheParams,
) -> Session<'a, 'g> {
    Session::new(model, threads, Recorder::new(None), cache).unwrap()
}

/// Evaluates a prompt and returns its best next token.
fn prompt(session: &mut Session, tokens: &[u32]) -> u32 {
    best(session.decode(tokens, Phase::Prompt, Logits::Last).unwrap())
}

/// Evaluates a token and returns the best next token.
fn step(session: &mut Session, token: u32) -> u32 {
    let logits = session.decode(&[token], Phase::Generate, Logits::Last);
    best(logits.unwrap())
}

fn best(logits: &[f32]) -> u32 {
    let best = (0..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1));
    best.unwrap().0
}

/// Prompts of different lengths.
fn prompts() -> [Vec<u32>; 3] {
    [
        (300..320).collect(),
        vec![7, 400, 33],
        (100..190).rev().collect(),
    ]
}

/// The greedy continuation of a prompt by `n` tokens, in a session of its own.
fn alone(model: &Model, threads: &Threads, tokens: &[u32], n: usize, ty: CacheType) -> Vec<u32> {
    let mut session = session(model, threads, CacheParams::of_type(ty, N_CTX));
    let mut token = prompt(&mut session, tokens);
    let mut continuation = Vec::new();
    for _ in 0..n {
        continuation.push(token);
        token = step(&mut session, token);
    }
    continuation
}

#[test]
fn interleaved_sequences_have_the_tokens_that_they_have_alone() {
    const N: usize = 24;
    let threads = Threads::new(2).unwrap();
    for (file, ty) in [
        ("random-qwen3moe-F16.gguf", CacheType::F32),
        ("random-gpt-oss-F16.gguf", CacheType::F32),
        ("random-olmoe-F16.gguf", CacheType::F16),
    ] {
        let gguf = Gguf::open(fixture(file)).unwrap();
        let model = Model::load(&gguf).unwrap();
        let cache = CacheParams::of_type(ty, N_CTX).with_sequences(3);
        let mut session = session(&model, &threads, cache);
        let mut next = Vec::new();
        for (slot, tokens) in prompts().iter().enumerate() {
            session.select_slot(slot).unwrap();
            next.push(prompt(&mut session, tokens));
        }
        let mut generated = vec![Vec::new(); 3];
        for i in 0..3 * N {
            // An irregular order: 0, 1, 2, 2, 0, 1, 1, 2, 0, ...
            let slot = (i + i / 3 * 2) % 3;
            session.select_slot(slot).unwrap();
            generated[slot].push(next[slot]);
            next[slot] = step(&mut session, next[slot]);
        }
        for (tokens, generated) in prompts().iter().zip(&generated) {
            assert_eq!(*generated, alone(&model, &threads, tokens, N, ty), "{file}");
        }
    }
}

#[test]
fn a_new_sequence_in_a_slot_leaves_the_other_slots_unchanged() {
    let threads = Threads::new(1).unwrap();
    let gguf = Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let [first, second, third] = prompts();
    let cache = CacheParams::of_type(CacheType::F32, N_CTX).with_sequences(2);
    let mut session = session(&model, &threads, cache);
    prompt(&mut session, &first);
    session.select_slot(1).unwrap();
    let mut next = prompt(&mut session, &second);
    session.select_slot(0).unwrap();
    session.begin_sequence(5);
    assert_eq!(session.n_past(), 0);
    prompt(&mut session, &third);
    session.select_slot(1).unwrap();
    assert_eq!(session.n_past(), second.len());
    for want in alone(&model, &threads, &second, 5, CacheType::F32) {
        assert_eq!(next, want);
        next = step(&mut session, next);
    }
}

#[test]
fn a_truncated_sequence_continues_from_its_prefix() {
    let threads = Threads::new(1).unwrap();
    let gguf = Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let [tokens, ..] = prompts();
    let cache = CacheParams::of_type(CacheType::F32, N_CTX);
    let mut session = session(&model, &threads, cache);
    prompt(&mut session, &tokens);
    step(&mut session, 3);
    session.truncate_slot(0, 12).unwrap();
    assert_eq!(session.n_past(), 12);
    let reused = prompt(&mut session, &tokens[12..]);
    assert_eq!(
        reused,
        alone(&model, &threads, &tokens, 1, CacheType::F32)[0]
    );
}

#[test]
fn rejects_slots_that_do_not_exist() {
    let threads = Threads::new(1).unwrap();
    let gguf = Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let mut session = session(&model, &threads, CacheParams::new(16).with_sequences(2));
    assert_eq!(session.n_slots(), 2);
    let error = session.select_slot(2).unwrap_err();
    assert_eq!(
        error.to_string(),
        "slot 2 of the KV cache is out of range (0..2)"
    );
    assert!(session.truncate_slot(7, 0).is_err());
}

/// Heads of the fixture have 16 elements.
#[test]
fn rejects_blocks_that_are_longer_than_a_head() {
    let threads = Threads::new(1).unwrap();
    let gguf = Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let head_dim = model.hparams().head_dim;
    assert_ne!(head_dim % 32, 0);
    let cache = CacheParams {
        v: CacheType::Q8_0,
        ..CacheParams::new(16)
    };
    let error = Session::new(&model, &threads, Recorder::new(None), cache).err();
    assert!(
        matches!(
            error,
            Some(Error::CacheType {
                what: "values",
                ty: CacheType::Q8_0,
                ..
            })
        ),
        "{error:?}"
    );
}
