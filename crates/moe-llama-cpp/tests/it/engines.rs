//! Runs both engines with the same tokens.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use moe_engine::{Decode, Logits, Mode, Observer, RouterOutput};
use moe_executor::cpu::threads::Threads;
use moe_executor::recorder::Recorder;
use moe_executor::{Adapter, CacheParams, CacheType};
use moe_gguf::Gguf;
use moe_gguf::kv_cache::KvTypes;
use moe_llama_cpp::{Params, Recording};
use moe_trace::Phase;

/// Context length.
pub const N_CTX: usize = 1024;

/// Maximum number of tokens of a batch.
const N_BATCH: usize = 512;

/// The result of a router for a token.
pub struct Row {
    /// Selected experts, best first.
    pub ids: Vec<i32>,
    /// Router logits of all experts.
    pub logits: Vec<f32>,
}

/// The results of an engine.
#[derive(Default)]
pub struct Answer {
    /// Logits after the prompt, and after each following token.
    pub logits: Vec<Vec<f32>>,
    /// Results of the routers, by layer and position.
    pub rows: BTreeMap<(usize, u32), Row>,
}

type Rows = Rc<RefCell<BTreeMap<(usize, u32), Row>>>;

fn collector(rows: &Rows) -> Observer<'static> {
    let rows = rows.clone();
    Box::new(move |routed: &RouterOutput| {
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

/// Evaluates the tokens in batches of the sizes `prompt`, and the tokens after them one at a time. Returns the logits after each
/// batch.
fn feed(session: &mut dyn Decode, tokens: &[u32], prompt: &[usize]) -> Vec<Vec<f32>> {
    let mut rest = tokens;
    let mut logits = Vec::new();
    for &n in prompt {
        let (batch, after) = rest.split_at(n);
        logits.push(feed_prompt(session, batch));
        rest = after;
    }
    for &token in rest {
        let after_token = session.decode(&[token], Phase::Generate, Logits::Last);
        logits.push(after_token.unwrap().to_vec());
    }
    logits
}

/// Evaluates a prompt and returns the logits after it.
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

/// The results of the executor with a KV cache of type `cache`.
pub fn native(gguf: &Gguf, tokens: &[u32], prompt: &[usize], cache: CacheType) -> Answer {
    native_with(gguf, &[], tokens, prompt, cache)
}

/// Like [`native`], with adapters.
pub fn native_with(
    gguf: &Gguf,
    adapters: &[Adapter],
    tokens: &[u32],
    prompt: &[usize],
    cache: CacheType,
) -> Answer {
    let model = moe_executor::Model::load_with_adapters(gguf, adapters).unwrap();
    let threads = Threads::new(1).unwrap();
    let cache = CacheParams::of_type(cache, N_CTX);
    let session = moe_executor::Session::new(&model, &threads, Recorder::new(None), cache);
    let mut session = session.unwrap();
    let rows = Rows::default();
    session.observe(collector(&rows));
    let logits = feed(&mut session, tokens, prompt);
    Answer {
        logits,
        rows: rows.take(),
    }
}

/// A variant of llama.cpp's computation.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    pub flash_attention: bool,
    /// Type of the KV cache.
    pub cache: CacheType,
}

/// The plain variant, with which the executor is compared.
pub const PLAIN: Variant = Variant {
    flash_attention: false,
    cache: CacheType::F32,
};

/// The other variants, whose distances from [`PLAIN`] are the scale for the executor's distance.
pub const OTHERS: [Variant; 3] = [
    Variant {
        flash_attention: false,
        cache: CacheType::F16,
    },
    Variant {
        flash_attention: true,
        cache: CacheType::F32,
    },
    Variant {
        flash_attention: true,
        cache: CacheType::F16,
    },
];

/// Parameters of llama.cpp, with one thread because its results depend on the number of threads.
pub fn params(variant: Variant) -> Params {
    Params {
        n_ctx: N_CTX as u32,
        n_seq: 1,
        n_batch: N_BATCH as u32,
        n_threads: 1,
        flash_attention: Some(variant.flash_attention),
        kv_types: KvTypes {
            k: variant.cache.ggml(),
            v: variant.cache.ggml(),
        },
    }
}

/// The results of llama.cpp in several variants.
pub fn llama_cpp<const N: usize>(
    gguf: &Gguf,
    tokens: &[u32],
    prompt: &[usize],
    variants: [Variant; N],
) -> [Answer; N] {
    let model = moe_llama_cpp::Model::load(gguf).unwrap();
    variants.map(|variant| {
        with_session(&model, gguf, variant, |session| {
            feed(session, tokens, prompt)
        })
    })
}

/// The results of llama.cpp's plain variant with adapters and their scales.
pub fn llama_cpp_with(
    gguf: &Gguf,
    adapters: &[(&Gguf, f32)],
    tokens: &[u32],
    prompt: &[usize],
) -> Answer {
    let model = moe_llama_cpp::Model::load_with_adapters(gguf, adapters).unwrap();
    with_session(&model, gguf, PLAIN, |session| feed(session, tokens, prompt))
}

/// Continues a prompt greedily with `n` tokens, using llama.cpp's plain variant. Returns the tokens and the results, including
/// those of the last token.
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
    // Neither the results nor the observer must notice this pass.
    session.warm_up().unwrap();
    let logits = feed(&mut session);
    drop(session);
    Answer {
        logits,
        rows: rows.take(),
    }
}
