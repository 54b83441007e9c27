//! Both engines, fed the same tokens.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use moe_engine::{Decode, Logits, Mode, Observer, Routed};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_gguf::Gguf;
use moe_llama_cpp::{Params, Recording};
use moe_trace::record::{PHASE_GENERATE, PHASE_PROMPT};

/// Positions that contexts have.
pub const N_CTX: usize = 1024;

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
            let before = rows.borrow_mut().insert((routed.layer, position), seen);
            assert!(before.is_none(), "a token is routed twice in a layer");
        }
    })
}

/// The first `n_prompt` tokens as one batch, the others one by one.
fn feed(session: &mut dyn Decode, tokens: &[u32], n_prompt: usize) -> Vec<Vec<f32>> {
    let (prompt, rest) = tokens.split_at(n_prompt);
    let after_prompt = session.decode(prompt, PHASE_PROMPT, Logits::Last);
    let mut logits = vec![after_prompt.unwrap().to_vec()];
    for &token in rest {
        let after_token = session.decode(&[token], PHASE_GENERATE, Logits::Last);
        logits.push(after_token.unwrap().to_vec());
    }
    logits
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
        n_batch: 512,
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
    let answer = |variant| {
        let rows = Rows::default();
        let recording = Recording::new(gguf, None, Mode::All, Some(collector(&rows)));
        let session = moe_llama_cpp::Session::new(&model, gguf, params(variant), N_CTX, recording);
        let logits = feed(&mut session.unwrap(), tokens, n_prompt);
        Answer {
            logits,
            rows: rows.take(),
        }
    };
    variants.map(answer)
}
