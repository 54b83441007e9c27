//! Generation of a complete sequence: the prompt in batches, then one token at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moe_trace::Phase;

use crate::{Decode, Error, Logits, Result, Sampler};

/// Limits of one call of [`generate`].
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of generated tokens.
    pub n_predict: usize,
    /// Maximum number of prompt tokens in a pass (llama.cpp's `n_ubatch`).
    pub n_batch: usize,
    /// Continue after an end-of-generation token.
    pub ignore_eos: bool,
}

/// Why a sequence ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// `n_predict` tokens were generated.
    Length,
    /// The model generated an end-of-generation token.
    EndOfGeneration,
    /// The context is full.
    ContextFull,
    /// The trace has reached its limit.
    TraceFull,
    /// The user interrupted the generation.
    Interrupted,
}

/// Result of [`generate`].
#[derive(Clone, Copy, Debug)]
pub struct Generated {
    /// Number of prompt tokens.
    pub n_prompt: usize,
    /// Number of generated tokens.
    pub n_generated: usize,
    /// Time of the passes over the prompt.
    pub prompt_time: Duration,
    /// Why the generation ended.
    pub stop: Stop,
}

/// Evaluates `prompt` and generates tokens after it. All generated tokens are evaluated, including the last, so that the trace
/// contains their routing. `on_token` is called with each generated token. Another
/// thread or a signal handler sets `interrupted` to end the generation after the current pass ([`Stop::Interrupted`]).
///
/// # Errors
/// The prompt exceeds the context, a token is outside the vocabulary, or the trace cannot be written.
pub fn generate(
    session: &mut dyn Decode,
    sampler: &mut Sampler,
    prompt: &[u32],
    limits: &Limits,
    interrupted: &AtomicBool,
    mut on_token: impl FnMut(u32),
) -> Result<Generated> {
    let n_free = session.n_ctx() - session.n_past();
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    if prompt.len() > n_free {
        return Err(Error::ContextFull {
            tokens: prompt.len(),
            context: n_free,
            trained: session.n_ctx_train(),
        });
    }
    let mut done = Generated {
        n_prompt: 0,
        n_generated: 0,
        prompt_time: Duration::ZERO,
        stop: Stop::Length,
    };
    let may_go_on = |session: &dyn Decode, n_tokens: usize| {
        if interrupted.load(Ordering::Relaxed) {
            return Err(Stop::Interrupted);
        }
        let has_room = session.has_room(n_tokens);
        if has_room {
            Ok(())
        } else {
            Err(Stop::TraceFull)
        }
    };
    let stopped = |done: Generated, stop| Ok(Generated { stop, ..done });

    let mut next = None;
    let start = Instant::now();
    for batch in prompt.chunks(limits.n_batch.max(1)) {
        if let Err(stop) = may_go_on(session, batch.len()) {
            return stopped(done, stop);
        }
        done.n_prompt += batch.len();
        let last = done.n_prompt == prompt.len();
        let wanted = if last && limits.n_predict > 0 {
            Logits::Last
        } else {
            Logits::None
        };
        let logits = session.decode(batch, Phase::Prompt, wanted)?;
        done.prompt_time = start.elapsed();
        if wanted == Logits::Last {
            next = Some(sampler.sample(logits));
        }
    }
    while let Some(token) = next {
        if session.is_eog(token) && !limits.ignore_eos {
            return stopped(done, Stop::EndOfGeneration);
        }
        if session.n_past() == session.n_ctx() {
            return stopped(done, Stop::ContextFull);
        }
        if let Err(stop) = may_go_on(session, 1) {
            return stopped(done, stop);
        }
        on_token(token);
        let logits = session.decode(&[token], Phase::Generate, Logits::Last)?;
        next = Some(sampler.sample(logits));
        done.n_generated += 1;
        if done.n_generated == limits.n_predict {
            return stopped(done, Stop::Length);
        }
    }
    Ok(done)
}

/// Maximum number of records of [`generate`] for a prompt of `n_prompt` tokens. `records_per_pass` returns the maximum for a
/// pass over a number of tokens.
pub fn max_records(
    records_per_pass: impl Fn(usize) -> u64,
    n_prompt: usize,
    n_ctx: usize,
    limits: &Limits,
) -> u64 {
    let n_batch = limits.n_batch.max(1);
    let (full, rest) = (n_prompt / n_batch, n_prompt % n_batch);
    let generated = limits.n_predict.min(n_ctx.saturating_sub(n_prompt));
    let rest = if rest > 0 { records_per_pass(rest) } else { 0 };
    full as u64 * records_per_pass(n_batch) + rest + generated as u64 * records_per_pass(1)
}
