//! A run of a model in llama.cpp, driven like any other engine's.

use moe_engine::{Decode, Error, Logits, Mode};
use moe_gguf::Gguf;
use moe_trace::record::MAX_EXPERTS;
use moe_trace::{Phase, RunWriter};

use crate::context::{Context, Params};
use crate::error::Result;
use crate::model::Model;
use crate::recording::{Batch, Recording};

/// State of a run. Sequences follow one another; each begins with an empty cache.
pub struct Session<'a> {
    context: Context<'a, Recording<'a>>,
    bound: Bound,
    n_ctx: usize,
    n_past: usize,
    sequence_id: u32,
}

impl<'a> Session<'a> {
    /// A session whose sequences may have `n_ctx` positions; the cache has as many as `params` say.
    ///
    /// # Errors
    /// As [`Context::new`].
    pub fn new(
        model: &'a Model,
        gguf: &Gguf,
        params: Params,
        n_ctx: usize,
        recording: Recording<'a>,
    ) -> Result<Session<'a>> {
        Ok(Session {
            bound: Bound::of(gguf),
            context: Context::new(model, params, recording)?,
            n_ctx,
            n_past: 0,
            sequence_id: 0,
        })
    }

    /// Records that a pass over `n_tokens` leaves at most, as far as can be told before the first.
    pub fn records_per_pass(gguf: &Gguf, n_tokens: usize, mode: Mode) -> u64 {
        Bound::of(gguf).records(n_tokens, mode)
    }
}

/// How many records a pass may leave.
struct Bound {
    /// Nodes that leave one record, and nodes that leave one a row: those of the longest pass so far, or a guess before it.
    ops: [u64; 2],
    /// Whether a pass has been seen.
    known: bool,
    /// Records of a row.
    per_row: u64,
}

impl Bound {
    /// Before the first pass: the graphs of the known architectures have two to three nodes a tensor, and as many again
    /// for the sum over a token's experts as it has experts.
    fn of(gguf: &Gguf) -> Bound {
        const NODES_PER_TENSOR: u64 = 4;
        let experts = gguf.tensors().iter().filter(|t| t.name.contains("_exps."));
        let arch = gguf.metadata().str("general.architecture").ok().flatten();
        let number = |key: &str| {
            let key = format!("{}.{key}", arch.unwrap_or_default());
            // llama.cpp has loaded the model, so that a value of another type is not one that it reads.
            let values = gguf.metadata().per_layer(&key).ok().flatten();
            let number = values.and_then(|values| values.max());
            number.unwrap_or(0).min(1 << 16)
        };
        let n_expert_used = number("expert_used_count").max(1);
        let sums = number("block_count") * n_expert_used;
        Bound {
            ops: [
                gguf.tensors().len() as u64 * NODES_PER_TENSOR + sums,
                experts.count() as u64,
            ],
            known: false,
            per_row: n_expert_used.div_ceil(MAX_EXPERTS as u64),
        }
    }

    /// Takes what a pass had for what the next will have.
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
        let recording = self.context.watch();
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
        let (position, wanted) = (self.n_past, logits == Logits::Last);
        self.context.watch_mut().begin(Batch {
            sequence_id: self.sequence_id,
            phase,
            position,
            n_tokens: tokens.len(),
            wanted,
        });
        self.context
            .decode(tokens, position, wanted)
            .map_err(Error::engine)?;
        self.n_past += tokens.len();
        let ops = self.context.watch_mut().end()?;
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
        self.context.watch_mut().stop_observing();
    }

    fn into_writer(mut self: Box<Self>) -> (Option<RunWriter>, moe_engine::Result<()>) {
        (self.context.watch_mut().take_writer(), Ok(()))
    }
}
