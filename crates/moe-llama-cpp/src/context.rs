//! Evaluating tokens, with a callback for every node of the graph.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use llama_cpp_sys_2 as sys;
use moe_gguf::kv_cache::KvTypes;

use crate::backend;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::node::Node;

/// Parameters of a context.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// Context length: maximum number of positions of all sequences together.
    pub n_ctx: u32,
    /// Number of sequences, at least 1. They share the context length equally.
    pub n_seq: u32,
    /// Maximum number of tokens of a batch. It is also llama.cpp's `n_ubatch`, so that a batch is one pass.
    pub n_batch: u32,
    /// Number of compute threads.
    pub n_threads: u32,
    /// Whether to use flash attention; `None` leaves the decision to llama.cpp.
    pub flash_attention: Option<bool>,
    /// Types of the KV cache.
    pub kv_types: KvTypes,
}

/// Callbacks for the nodes of every graph.
pub trait EvalCallback {
    /// Called before a node is computed. If it returns true, the node is computed separately, and `after` is called. Other nodes
    /// are computed together with the next such node.
    fn before(&mut self, node: Node<'_>) -> bool;

    /// Called after a node was computed for which `before` returned true.
    fn after(&mut self, node: Node<'_>);
}

/// Ignores all nodes.
impl EvalCallback for () {
    fn before(&mut self, _: Node<'_>) -> bool {
        false
    }

    fn after(&mut self, _: Node<'_>) {}
}

/// A KV cache and the buffers of a graph.
pub struct Context<'m, W> {
    model: &'m Model,
    raw: NonNull<sys::llama_context>,
    /// From `Box::into_raw`, because llama.cpp stores the pointer.
    callback: NonNull<W>,
    n_batch: usize,
    has_logits: bool,
    sizes: Vec<String>,
}

impl<'m, W: EvalCallback> Context<'m, W> {
    /// Creates a context with an empty cache, without a warm-up pass.
    ///
    /// # Errors
    /// There is not enough memory, or the model does not support the parameters.
    pub fn new(model: &'m Model, params: Params, callback: W) -> Result<Context<'m, W>> {
        // SAFETY: the function has no preconditions.
        let mut raw_params = unsafe { sys::llama_context_default_params() };
        raw_params.n_ctx = params.n_ctx;
        raw_params.n_batch = params.n_batch;
        raw_params.n_ubatch = params.n_batch;
        raw_params.n_seq_max = params.n_seq.max(1);
        raw_params.n_threads = params.n_threads as i32;
        raw_params.n_threads_batch = params.n_threads as i32;
        raw_params.flash_attn_type = match params.flash_attention {
            None => sys::LLAMA_FLASH_ATTN_TYPE_AUTO,
            Some(true) => sys::LLAMA_FLASH_ATTN_TYPE_ENABLED,
            Some(false) => sys::LLAMA_FLASH_ATTN_TYPE_DISABLED,
        };
        // The ids of types in files are those of `ggml_type`.
        raw_params.type_k = params.kv_types.k.id() as sys::ggml_type;
        raw_params.type_v = params.kv_types.v.id() as sys::ggml_type;
        // Like llama.cpp's programs: the cache of sliding-window attention has the length of the window.
        raw_params.swa_full = false;
        let callback = NonNull::from(Box::leak(Box::new(callback)));
        // llama.cpp sets this callback again for each graph that it builds.
        raw_params.cb_eval = Some(eval_callback::<W>);
        raw_params.cb_eval_user_data = callback.as_ptr().cast();
        backend::forget_log();
        backend::forget_sizes();
        // SAFETY: the model lives for `'m`; the callback and its data live as long as the context, see `drop`.
        let raw = unsafe { sys::llama_init_from_model(model.raw.as_ptr(), raw_params) };
        let Some(raw) = NonNull::new(raw) else {
            // SAFETY: the box was leaked above, and no context has the pointer.
            drop(unsafe { Box::from_raw(callback.as_ptr()) });
            return Err(Error::Context {
                n_ctx: params.n_ctx,
                reason: backend::logged(),
            });
        };
        let (mut adapters, mut scales) = model.adapters();
        if !adapters.is_empty() {
            // SAFETY: the context is valid, and both arrays have the same length. The adapters live as long as the model.
            unsafe {
                sys::llama_set_adapters_lora(
                    raw.as_ptr(),
                    adapters.as_mut_ptr(),
                    adapters.len(),
                    scales.as_mut_ptr(),
                );
            }
        }
        Ok(Context {
            model,
            raw,
            callback,
            n_batch: params.n_batch as usize,
            has_logits: false,
            sizes: backend::logged_sizes(),
        })
    }

    /// The model.
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// The lines that llama.cpp logged about the sizes of the context's buffers:
    /// `llama_kv_cache: size =   12.00 MiB (  4096 cells,   6 layers,  1/1 seqs), K (f16): …`.
    pub fn sizes(&self) -> &[String] {
        &self.sizes
    }

    /// The callbacks for nodes.
    pub fn callback(&self) -> &W {
        // SAFETY: leaked by `new`; llama.cpp uses it only during `decode`, which borrows the context mutably.
        unsafe { self.callback.as_ref() }
    }

    /// The callbacks for nodes, mutable.
    pub fn callback_mut(&mut self) -> &mut W {
        // SAFETY: as in `callback`.
        unsafe { self.callback.as_mut() }
    }

    /// Empties the cache.
    pub fn clear(&mut self) {
        // SAFETY: the context and its memory are valid.
        unsafe { sys::llama_memory_clear(sys::llama_get_memory(self.raw.as_ptr()), false) };
    }

    /// Evaluates a batch whose first token is at `position`; the cache must contain the preceding tokens. With `with_logits`, computes
    /// the [`Context::logits`] of the last token.
    ///
    /// # Errors
    /// The batch has no tokens or too many, a token is outside the vocabulary, or the cache is full.
    pub fn decode(&mut self, tokens: &[u32], position: usize, with_logits: bool) -> Result<()> {
        let n_vocab = self.model.n_vocab();
        if tokens.is_empty() || tokens.len() > self.n_batch {
            return Err(Error::Batch {
                n_tokens: tokens.len(),
                n_batch: self.n_batch,
            });
        }
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= n_vocab) {
            return Err(Error::Token { token, n_vocab });
        }
        let mut ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let mut positions: Vec<i32> = (position..).take(tokens.len()).map(|p| p as i32).collect();
        let mut outputs = vec![0i8; tokens.len()];
        if let Some(last) = outputs.last_mut() {
            *last = i8::from(with_logits);
        }
        let batch = sys::llama_batch {
            n_tokens: tokens.len() as i32,
            token: ids.as_mut_ptr(),
            embd: ptr::null_mut(),
            pos: positions.as_mut_ptr(),
            // null: all tokens belong to sequence 0
            n_seq_id: ptr::null_mut(),
            seq_id: ptr::null_mut(),
            logits: outputs.as_mut_ptr(),
        };
        self.has_logits = false;
        backend::forget_log();
        // SAFETY: the arrays of the batch have `n_tokens` elements and live during the call.
        let code = unsafe { sys::llama_decode(self.raw.as_ptr(), batch) };
        if code != 0 {
            return Err(Error::Decode {
                n_tokens: tokens.len(),
                position,
                code,
                reason: backend::logged(),
            });
        }
        self.has_logits = with_logits;
        Ok(())
    }

    /// Logits `(n_vocab)` of the last token of the previous batch; empty if they were not requested.
    pub fn logits(&self) -> &[f32] {
        if !self.has_logits {
            return &[];
        }
        // SAFETY: the last token has logits, which are valid until the next batch.
        let logits = unsafe { sys::llama_get_logits_ith(self.raw.as_ptr(), -1) };
        match NonNull::new(logits) {
            // SAFETY: the logits of a token have `n_vocab` values.
            Some(logits) => unsafe {
                std::slice::from_raw_parts(logits.as_ptr(), self.model.n_vocab())
            },
            None => &[],
        }
    }
}

impl<W> Drop for Context<'_, W> {
    fn drop(&mut self) {
        // SAFETY: created by `new`, freed once.
        unsafe { sys::llama_free(self.raw.as_ptr()) };
        // SAFETY: leaked by `new`; the context that had the pointer was freed.
        drop(unsafe { Box::from_raw(self.callback.as_ptr()) });
    }
}

/// The callback of llama.cpp, called before (`ask`) and after a node. The result after a node is whether to continue.
unsafe extern "C" fn eval_callback<W: EvalCallback>(
    node: *mut sys::ggml_tensor,
    before: bool,
    callback: *mut c_void,
) -> bool {
    // SAFETY: the pointer is the context's `callback`, and no other reference to it exists during `decode`.
    let callback = unsafe { &mut *callback.cast::<W>() };
    // SAFETY: the node and its sources live during the call.
    match unsafe { Node::new(node) } {
        Some(node) if before => callback.before(node),
        Some(node) => {
            callback.after(node);
            true
        }
        None => false,
    }
}
