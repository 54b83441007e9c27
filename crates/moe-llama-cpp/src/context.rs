//! Evaluating tokens, with a callback for every node of the graph.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use llama_cpp_sys_2 as sys;
use moe_gguf::GgmlType;

use crate::backend;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::node::Node;

/// Parameters of a context.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// Context length: maximum number of positions of a sequence.
    pub n_ctx: u32,
    /// Maximum number of tokens of a batch. It is also llama.cpp's `n_ubatch`, so that a batch is one pass.
    pub n_batch: u32,
    /// Number of compute threads.
    pub n_threads: u32,
    /// Whether to use flash attention; `None` leaves the decision to llama.cpp.
    pub flash_attention: Option<bool>,
    /// Type of the keys in the KV cache.
    pub type_k: GgmlType,
    /// Type of the values in the KV cache.
    pub type_v: GgmlType,
}

/// Callbacks for the nodes of every graph.
pub trait Watch {
    /// Called before a node is computed. If it returns true, the node is computed separately, and `after` is called. Other nodes
    /// are computed together with the next such node.
    fn before(&mut self, node: Node<'_>) -> bool;

    /// Called after a node was computed for which `before` returned true.
    fn after(&mut self, node: Node<'_>);
}

/// Ignores all nodes.
impl Watch for () {
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
    watch: NonNull<W>,
    n_batch: usize,
    has_logits: bool,
}

impl<'m, W: Watch> Context<'m, W> {
    /// Creates a context with an empty cache, without a warm-up pass.
    ///
    /// # Errors
    /// There is not enough memory, or the model does not support the parameters.
    pub fn new(model: &'m Model, params: Params, watch: W) -> Result<Context<'m, W>> {
        // SAFETY: the function has no preconditions.
        let mut raw_params = unsafe { sys::llama_context_default_params() };
        raw_params.n_ctx = params.n_ctx;
        raw_params.n_batch = params.n_batch;
        raw_params.n_ubatch = params.n_batch;
        raw_params.n_seq_max = 1;
        raw_params.n_threads = params.n_threads as i32;
        raw_params.n_threads_batch = params.n_threads as i32;
        raw_params.flash_attn_type = match params.flash_attention {
            None => sys::LLAMA_FLASH_ATTN_TYPE_AUTO,
            Some(true) => sys::LLAMA_FLASH_ATTN_TYPE_ENABLED,
            Some(false) => sys::LLAMA_FLASH_ATTN_TYPE_DISABLED,
        };
        raw_params.type_k = params.type_k.id();
        raw_params.type_v = params.type_v.id();
        // Like llama.cpp's programs: the cache of sliding-window attention has the length of the window.
        raw_params.swa_full = false;
        let watch = NonNull::from(Box::leak(Box::new(watch)));
        // llama.cpp sets this callback again for each graph that it builds.
        raw_params.cb_eval = Some(show::<W>);
        raw_params.cb_eval_user_data = watch.as_ptr().cast();
        backend::forget_log();
        // SAFETY: the model lives for `'m`; the callback and its data live as long as the context, see `drop`.
        let raw = unsafe { sys::llama_init_from_model(model.raw.as_ptr(), raw_params) };
        let Some(raw) = NonNull::new(raw) else {
            // SAFETY: the box was leaked above, and no context has the pointer.
            drop(unsafe { Box::from_raw(watch.as_ptr()) });
            return Err(Error::Context {
                n_ctx: params.n_ctx,
                reason: backend::logged(),
            });
        };
        Ok(Context {
            model,
            raw,
            watch,
            n_batch: params.n_batch as usize,
            has_logits: false,
        })
    }

    /// The model.
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// The callbacks for nodes.
    pub fn watch(&self) -> &W {
        // SAFETY: leaked by `new`; llama.cpp uses it only during `decode`, which borrows the context mutably.
        unsafe { self.watch.as_ref() }
    }

    /// The callbacks for nodes, mutable.
    pub fn watch_mut(&mut self) -> &mut W {
        // SAFETY: as in `watch`.
        unsafe { self.watch.as_mut() }
    }

    /// Empties the cache.
    pub fn clear(&mut self) {
        // SAFETY: the context and its memory are valid.
        unsafe { sys::llama_memory_clear(sys::llama_get_memory(self.raw.as_ptr()), false) };
    }

    /// Evaluates a batch whose first token is at `position`; the cache must contain the preceding tokens. With `wanted`, computes
    /// the [`Context::logits`] of the last token.
    ///
    /// # Errors
    /// The batch has no tokens or too many, a token is outside the vocabulary, or the cache is full.
    pub fn decode(&mut self, tokens: &[u32], position: usize, wanted: bool) -> Result<()> {
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
            *last = i8::from(wanted);
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
        self.has_logits = wanted;
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
        drop(unsafe { Box::from_raw(self.watch.as_ptr()) });
    }
}

/// The callback of llama.cpp, called before (`ask`) and after a node. The result after a node is whether to continue.
unsafe extern "C" fn show<W: Watch>(
    node: *mut sys::ggml_tensor,
    before: bool,
    watch: *mut c_void,
) -> bool {
    // SAFETY: the pointer is the context's `watch`, and no other reference to it exists during `decode`.
    let watch = unsafe { &mut *watch.cast::<W>() };
    // SAFETY: the node and its sources live during the call.
    match unsafe { Node::new(node) } {
        Some(node) if before => watch.before(node),
        Some(node) => {
            watch.after(node);
            true
        }
        None => false,
    }
}
