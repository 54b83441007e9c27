//! Both engines, fed the same tokens.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use moe_engine::{Decode, Logits, Mode, Observer, Routed};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_gguf::Gguf;
use moe_llama_cpp::{Params, Recording};
use moe_trace::Phase;

/// Positions that contexts have.
pub const N_CTX: usize = 1024;

/// Tokens of a batch.
const N_BATCH: usize = 512;

/// What a router said of one token.
pub struct Row {
    /// Chosen experts, best first.
    pub ids: Vec<i32>,
    /// Scores of all experts.
    pub logits: Vec<f32>,
}

/// What an engine answered.
#[derive(Default)]
pub struct Answer {
    /// After the prompt, and after each token behind it.
    pub logits: Vec<Vec<f32>>,
    /// By layer and position.
    pub rows: BTreeMap<(usize, u32), Row>,
}

type Rows = Rc<RefCell<BTreeMap<(usize, u32), Row>>>;

fn collector(rows: &Rows) -> Observer<'static> {
    let rows = rows.clone();
    Box::new(move |routed: &Routed| {
        let k = routed.n_expert_used;
        let n_expert = routed.logits.len() / routed.positions.len();
        for (row, &position) in routed.positions.iter().enumerate() {
            let seen = Row {
                ids: routed.ids[row * k..][..k].to_vec(),
                logits: routed.logits[row * n_expert..][..n_expert].to_vec(),
            };
            let before = rows
                .borrow_mut()
                .insert((routed.layer.index(), position), seen);
            assert!(before.is_none(), "a token is routed twice in a layer");
        }
    })
}

/// The first `n_prompt` tokens in batches of at most [`N_BATCH`], the others one by one.
fn feed(session: &mut dyn Decode, tokens: &[u32], n_prompt: usize) -> Vec<Vec<f32>> {
    let (prompt, rest) = tokens.split_at(n_prompt);
    let mut logits = vec![feed_prompt(session, prompt)];
    for &token in rest {
        let after_token = session.decode(&[token], Phase::Generate, Logits::Last);
        logits.push(after_token.unwrap().to_vec());
    }
    logits
}

/// Returns the logits after the prompt.
fn feed_prompt(session: &mut dyn Decode, prompt: &[u32]) -> Vec<f32> {
    let mut batches = prompt.chunks(N_BATCH).peekable();
    while let Some(batch) = batches.next() {
        let is_last = batches.peek().is_none();
        let wanted = if is_last { Logits::Last } else { Logits::None };
        let logits = session.decode(batch, Phase::Prompt, wanted).unwrap();
        if is_last {
            return logits.to_vec();
        }
    }
    panic!("the prompt has no tokens")
}

/// The executor's answer.
pub fn native(gguf: &Gguf, tokens: &[u32], n_prompt: usize) -> Answer {
    let model = moe_executor::Model::load(gguf).unwrap();
    let threads = Threads::new(1).unwrap();
    let mut session = moe_executor::Session::new(&model, &threads, Recorder::new(None), N_CTX);
    let rows = Rows::default();
    session.observe(collector(&rows));
    let logits = feed(&mut session, tokens, n_prompt);
    Answer {
        logits,
        rows: rows.take(),
    }
}

/// One of the ways in which llama.cpp computes the same thing.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    pub flash_attention: bool,
    pub kv_f32: bool,
}

/// The plainest arithmetic: the one that the executor is held against.
pub const PLAIN: Variant = Variant {
    flash_attention: false,
    kv_f32: true,
};

/// The others, which tell how far llama.cpp is from itself.
pub const OTHERS: [Variant; 3] = [
    Variant {
        flash_attention: false,
        kv_f32: false,
    },
    Variant {
        flash_attention: true,
        kv_f32: true,
    },
    Variant {
        flash_attention: true,
        kv_f32: false,
    },
];

/// How llama.cpp is run: on one thread, as its results depend on their number.
pub fn params(variant: Variant) -> Params {
    Params {
        n_ctx: N_CTX as u32,
        n_batch: N_BATCH as u32,
        n_threads: 1,
        flash_attention: Some(variant.flash_attention),
        kv_f32: variant.kv_f32,
    }
}

/// llama.cpp's answers in several variants.
pub fn llama_cpp<const N: usize>(
    gguf: &Gguf,
    tokens: &[u32],
    n_prompt: usize,
    variants: [Variant; N],
) -> [Answer; N] {
    let model = moe_llama_cpp::Model::load(gguf).unwrap();
    variants.map(|variant| {
        with_session(&model, gguf, variant, |session| {
            feed(session, tokens, n_prompt)
        })
    })
}

/// Continues a prompt with the `n` tokens that llama.cpp's plainest arithmetic finds best; returns them and its answer, which
/// includes the evaluation of the last of them.
pub fn greedy(
    model: &moe_llama_cpp::Model,
    gguf: &Gguf,
    prompt: &[u32],
    n: usize,
) -> (Vec<u32>, Answer) {
    let mut generated = Vec::new();
    let answer = with_session(model, gguf, PLAIN, |session| {
        let mut logits = vec![feed_prompt(session, prompt)];
        for _ in 0..n {
            let token = top_k(&logits[logits.len() - 1], 1)[0];
            generated.push(token);
            let after_token = session.decode(&[token], Phase::Generate, Logits::Last);
            logits.push(after_token.unwrap().to_vec());
        }
        logits
    });
    (generated, answer)
}

/// The ids of the `k` highest logits, highest first.
pub fn top_k(logits: &[f32], k: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    ids.truncate(k);
    ids
}

fn with_session(
    model: &moe_llama_cpp::Model,
    gguf: &Gguf,
    variant: Variant,
    feed: impl FnOnce(&mut dyn Decode) -> Vec<Vec<f32>>,
) -> Answer {
    let rows = Rows::default();
    let recording = Recording::new(gguf, None, Mode::All, Some(collector(&rows)));
    let session = moe_llama_cpp::Session::new(model, gguf, params(variant), N_CTX, recording);
    let mut session = session.unwrap();
    let logits = feed(&mut session);
    drop(session);
    Answer {
        logits,
        rows: rows.take(),
    }
}
