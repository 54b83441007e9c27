//! Several sequences in one session, and the types of the KV cache.

use moe_engine::{BatchEntry, BatchSession, Decode, Logits};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Error, Model, Session};
use moe_gguf::{GgmlType, Gguf};
use moe_testkit::fixture;
use moe_trace::Phase;

use crate::hot_cache::synthetic::{ARCHITECTURES, synthetic};
use crate::records::described;

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

/// The entries of `tokens` from `position` on; the logits of the last one are wanted.
fn entries(slot: usize, position: usize, tokens: &[u32]) -> Vec<BatchEntry> {
    let phase = if tokens.len() > 1 {
        Phase::Prompt
    } else {
        Phase::Generate
    };
    let entry = |(i, &token): (usize, &u32)| BatchEntry {
        slot,
        token,
        position: position + i,
        phase,
        logits: i + 1 == tokens.len(),
    };
    tokens.iter().enumerate().map(entry).collect()
}

/// Prompts in one pass, then one token of each sequence per pass.
#[test]
fn batches_of_several_sequences_have_the_tokens_of_each_alone() {
    for file in ["random-qwen3moe-F16.gguf", "random-gpt-oss-F16.gguf"] {
        let gguf = Gguf::open(fixture(file)).unwrap();
        compare_batch_with_each_alone(&gguf, file, &prompts());
    }
    for (seed, arch) in (0..).zip(ARCHITECTURES) {
        let prompts = [
            (20..40).collect(),
            vec![7, 390, 33],
            (100..190).rev().collect(),
        ];
        compare_batch_with_each_alone(&synthetic(arch, seed), arch, &prompts);
    }
    for description in [
        described::description("deepseek2"),
        described::description("mistral4"),
        described::with_decompressed_keys(),
    ] {
        let gguf = described::model(&description, GgmlType::F32);
        compare_batch_with_each_alone(&gguf, &description.arch, &prompts());
    }
}

/// Architectures with recurrent states.
pub const RECURRENT: [&str; 6] = [
    "granitehybrid",
    "kimi-linear",
    "lfm2moe",
    "nemotron_h_moe",
    "qwen35moe",
    "qwen3next",
];

/// An F32 model of a description in `fixtures/architectures`.
fn small_model(arch: &str) -> Gguf {
    described::model(&described::description(arch), GgmlType::F32)
}

#[test]
fn batches_of_recurrent_models_have_the_tokens_of_each_sequence_alone() {
    for arch in RECURRENT {
        compare_batch_with_each_alone(&small_model(arch), arch, &prompts());
    }
}

#[test]
fn recurrent_states_belong_to_one_sequence() {
    let threads = Threads::new(1).unwrap();
    for arch in RECURRENT {
        let gguf = small_model(arch);
        let model = Model::load(&gguf).unwrap();
        let [first, second, third] = prompts();
        let cache = CacheParams::of_type(CacheType::F32, N_CTX).with_sequences(2);
        let mut session = session(&model, &threads, cache);
        prompt(&mut session, &first);
        session.select_slot(1).unwrap();
        // The prompt in two parts.
        prompt(&mut session, &second[..1]);
        let mut next = prompt(&mut session, &second[1..]);
        session.select_slot(0).unwrap();
        session.begin_sequence(5);
        let best_of_third = prompt(&mut session, &third);
        let expected = alone(&model, &threads, &third, 1, CacheType::F32);
        assert_eq!(best_of_third, expected[0], "{arch}");
        session.select_slot(1).unwrap();
        for want in alone(&model, &threads, &second, 5, CacheType::F32) {
            assert_eq!(next, want, "{arch}");
            next = step(&mut session, next);
        }
        // States cannot be rewound to a prefix.
        let error = session.truncate_slot(0, 12).unwrap_err();
        assert!(error.to_string().contains("cannot be truncated"), "{error}");
        session.truncate_slot(0, 0).unwrap();
        session.select_slot(0).unwrap();
        assert_eq!(prompt(&mut session, &third), expected[0], "{arch}");
    }
}

fn compare_batch_with_each_alone(gguf: &Gguf, name: &str, prompts: &[Vec<u32>; 3]) {
    const N: usize = 16;
    let threads = Threads::new(2).unwrap();
    let model = Model::load(gguf).unwrap();
    let n_vocab = model.hparams().n_vocab;
    let cache = CacheParams::of_type(CacheType::F32, N_CTX).with_sequences(4);
    let mut session = session(&model, &threads, cache);
    // Slot 1 stays empty.
    let slots = [2, 0, 3];
    let of_prompt = |(slot, tokens): (&usize, &Vec<u32>)| entries(*slot, 0, tokens);
    let mut batch: Vec<BatchEntry> = slots.iter().zip(prompts).flat_map(of_prompt).collect();
    let mut generated = vec![Vec::new(); 3];
    for _ in 0..N {
        let logits = session.decode_batch(&batch).unwrap();
        assert_eq!(logits.len(), 3 * n_vocab);
        let tokens: Vec<u32> = logits.chunks_exact(n_vocab).map(best).collect();
        batch.clear();
        for (i, token) in tokens.into_iter().enumerate() {
            generated[i].push(token);
            let position = session.slot_len(slots[i]).unwrap();
            batch.extend(entries(slots[i], position, &[token]));
        }
    }
    assert_eq!(session.slot_len(1).unwrap(), 0);
    for (tokens, generated) in prompts.iter().zip(&generated) {
        let alone = alone(&model, &threads, tokens, N, CacheType::F32);
        assert_eq!(*generated, alone, "{name}");
    }
}

#[test]
fn rejects_batches_that_do_not_continue_their_sequences() {
    let threads = Threads::new(1).unwrap();
    let gguf = Gguf::open(fixture("random-qwen3moe-F16.gguf")).unwrap();
    let model = Model::load(&gguf).unwrap();
    let cache = CacheParams::of_type(CacheType::F32, 4).with_sequences(2);
    let mut session = session(&model, &threads, cache);
    let mut error = |batch: &[BatchEntry]| {
        let error = session.decode_batch(batch).err();
        error.map_or(String::new(), |error| error.to_string())
    };
    assert_eq!(error(&entries(0, 0, &[1, 2])), "");
    assert_eq!(
        error(&entries(0, 1, &[1])),
        "the next position of slot 0 is 2, but the batch has a token at position 1; truncate the slot, or pass the tokens \
         between them"
    );
    assert!(error(&entries(2, 0, &[1])).starts_with("slot 2 of the KV cache"));
    assert!(error(&entries(1, 0, &[1 << 30])).contains("token"));
    assert!(error(&entries(1, 0, &[1, 2, 3, 4, 5])).contains("context"));
    assert_ne!(error(&[]), "");
    assert_eq!(error(&entries(0, 2, &[1])), "");
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
        "slot 2 of the KV cache is out of range (0..=1)"
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

#[test]
fn rejects_two_types_of_a_row_with_keys_and_values() {
    let threads = Threads::new(1).unwrap();
    let description = described::description("deepseek2");
    let gguf = described::model(&description, GgmlType::F32);
    let model = Model::load(&gguf).unwrap();
    let cache = CacheParams {
        v: CacheType::F32,
        ..CacheParams::new(16)
    };
    let error = Session::new(&model, &threads, Recorder::new(None), cache).err();
    assert!(
        matches!(
            error,
            Some(Error::CacheTypes {
                k: CacheType::F16,
                v: CacheType::F32,
                ..
            })
        ),
        "{error:?}"
    );
}
