//! The session of llama.cpp.

use moe_engine::{Decode, Error, Logits, Mode};
use moe_gguf::Gguf;
use moe_trace::record::MAX_EXPERTS;
use moe_trace::{Phase, RunWriter};

use crate::context::{Context, Params};
use crate::error::Result;
use crate::model::Model;
use crate::recording::{Batch, Recording};

/// A session of a model in llama.cpp. Sequences are evaluated one after another; each starts with an empty KV cache.
pub struct Session<'a> {
    context: Context<'a, Recording<'a>>,
    bound: Bound,
    n_ctx: usize,
    n_past: usize,
    sequence_id: u32,
}

impl<'a> Session<'a> {
    /// Creates a session with the context length `n_ctx`. The size of the KV cache is that of `params`.
    ///
    /// # Errors
    /// Those of [`Context::new`].
    pub fn new(
        model: &'a Model,
        gguf: &Gguf,
        params: Params,
        n_ctx: usize,
        recording: Recording<'a>,
    ) -> Result<Session<'a>> {
        Ok(Session {
            bound: Bound::of(model, gguf),
            context: Context::new(model, params, recording)?,
            n_ctx,
            n_past: 0,
            sequence_id: 0,
        })
    }

    /// Evaluates a token without callbacks, and empties the cache again. llama.cpp ends the process if it cannot evaluate a model;
    /// with this pass, that happens before a run directory is replaced.
    ///
    /// # Errors
    /// Those of [`Context::decode`].
    pub fn warm_up(&mut self) -> Result<()> {
        let observer = self.context.callback_mut().replace_observer(None);
        let evaluated = self.context.decode(&[0], 0, true);
        self.context.callback_mut().replace_observer(observer);
        self.context.clear();
        evaluated
    }

    /// Writes the records of the following passes to a run directory. A run that is created after the session does not replace
    /// another one if llama.cpp cannot create the session.
    pub fn record(&mut self, writer: RunWriter) {
        self.context.callback_mut().set_writer(writer);
    }

    /// Estimated maximum number of records of a pass over `n_tokens` tokens, before the first pass.
    pub fn records_per_pass(model: &Model, gguf: &Gguf, n_tokens: usize, mode: Mode) -> u64 {
        Bound::of(model, gguf).records(n_tokens, mode)
    }
}

/// Number of positions for [`Params::n_ctx`] of a session that uses `n_positions` of a context of `n_ctx` positions. Of the factors of
/// longrope, llama.cpp uses the long ones in contexts of more than `rope.scaling.original_context_length` positions. It rounds the number
/// of positions up to a multiple of 256 before.
pub fn positions_to_allocate(gguf: &Gguf, n_positions: usize, n_ctx: usize) -> usize {
    let has_factors = |t: &moe_gguf::Tensor| t.name.ends_with("rope_factors_long.weight");
    let arch = gguf.metadata().str("general.architecture").ok().flatten();
    let key = |suffix| format!("{}.{suffix}", arch.unwrap_or_default());
    let number = |key: String| gguf.metadata().u64(&key).ok().flatten();
    let original = number(key("rope.scaling.original_context_length"))
        .or_else(|| number(key("context_length")))
        .and_then(|n| usize::try_from(n).ok());
    match original {
        Some(original) if n_ctx > original && gguf.tensors().iter().any(has_factors) => {
            n_positions.max(original + 1)
        }
        _ => n_positions,
    }
}

/// Upper bound of the number of records of a pass.
struct Bound {
    /// Number of nodes with one record, and of nodes with a record for each token: the maximum over the passes so far, or an
    /// estimate before the first.
    ops: [u64; 2],
    /// Whether a pass was evaluated.
    known: bool,
    /// Records of a token in an expert operation.
    per_row: u64,
}

impl Bound {
    /// The estimate before the first pass. Graphs of the known architectures have two to three nodes for each tensor, and in each
    /// layer `n_expert_used` nodes for the sum over a token's experts.
    fn of(model: &Model, gguf: &Gguf) -> Bound {
        const NODES_PER_TENSOR: u64 = 4;
        let [adapted, adapted_experts] = model.n_adapted();
        let experts = gguf.tensors().iter().filter(|t| t.name.contains("_exps."));
        let arch = gguf.metadata().str("general.architecture").ok().flatten();
        let number = |key: &str| {
            let key = format!("{}.{key}", arch.unwrap_or_default());
            // llama.cpp has loaded the model, so it does not read a value of another type.
            let values = gguf.metadata().per_layer(&key).ok().flatten();
            let number = values.and_then(|values| values.max());
            number.unwrap_or(0).min(1 << 16)
        };
        let n_expert_used = number("expert_used_count").max(1);
        let sums = number("block_count") * n_expert_used;
        Bound {
            ops: [
                gguf.tensors().len() as u64 * NODES_PER_TENSOR
                    + sums
                    + 4 * adapted
                    + 2 * adapted_experts,
                experts.count() as u64 + 2 * adapted_experts,
            ],
            known: false,
            per_row: n_expert_used.div_ceil(MAX_EXPERTS as u64),
        }
    }

    /// Updates the bound with the numbers of a pass.
    fn learn(&mut self, ops: [u64; 2]) {
        if !std::mem::replace(&mut self.known, true) {
            self.ops = [0; 2];
        }
        for (bound, seen) in self.ops.iter_mut().zip(ops) {
            *bound = seen.max(*bound);
        }
    }

    fn records(&self, n_tokens: usize, mode: Mode) -> u64 {
        let [once, by_row] = self.ops;
        let by_row = by_row * self.per_row * n_tokens as u64;
        match mode {
            Mode::All => once + by_row,
            Mode::Experts => by_row,
        }
    }
}

impl Decode for Session<'_> {
    fn begin_sequence(&mut self, sequence_id: u32) {
        self.sequence_id = sequence_id;
        self.n_past = 0;
        self.context.clear();
    }

    fn n_past(&self) -> usize {
        self.n_past
    }

    fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    fn n_ctx_train(&self) -> usize {
        self.context.model().n_ctx_train()
    }

    fn is_eog(&self, token: u32) -> bool {
        self.context.model().is_eog(token)
    }

    fn has_room(&self, n_tokens: usize) -> bool {
        let recording = self.context.callback();
        let records = self.bound.records(n_tokens, recording.mode());
        recording.writer().is_none_or(|w| w.has_room(records))
    }

    fn decode(
        &mut self,
        tokens: &[u32],
        phase: Phase,
        logits: Logits,
    ) -> moe_engine::Result<&[f32]> {
        if self.n_past + tokens.len() > self.n_ctx {
            return Err(Error::ContextFull {
                tokens: self.n_past + tokens.len(),
                context: self.n_ctx,
                trained: self.n_ctx_train(),
            });
        }
        let (position, with_logits) = (self.n_past, logits == Logits::Last);
        self.context.callback_mut().begin(Batch {
            sequence_id: self.sequence_id,
            phase,
            position,
            n_tokens: tokens.len(),
            with_logits,
        });
        self.context
            .decode(tokens, position, with_logits)
            .map_err(Error::engine)?;
        self.n_past += tokens.len();
        let ops = self.context.callback_mut().end()?;
        self.bound.learn(ops);
        let logits = self.context.logits();
        if logits.iter().any(|logit| logit.is_nan()) {
            return Err(Error::NotFinite {
                node: "result_output".to_owned(),
                position: (self.n_past - 1) as u32,
            });
        }
        Ok(logits)
    }
}

impl moe_engine::Session for Session<'_> {
    fn stop_observing(&mut self) {
        self.context.callback_mut().replace_observer(None);
    }

    fn into_writer(mut self: Box<Self>) -> (Option<RunWriter>, moe_engine::Result<()>) {
        (self.context.callback_mut().take_writer(), Ok(()))
    }
}
