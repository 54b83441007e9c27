//! A whole sequence: the prompt in batches, then one token after another.

use std::sync::atomic::{AtomicBool, Ordering};

use moe_trace::Phase;

use crate::{Decode, Error, Logits, Result, Sampler};

/// How far to go.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens to generate at most.
    pub n_predict: usize,
    /// Prompt tokens evaluated at once (llama.cpp's `ubatch`).
    pub n_batch: usize,
    /// Go on after a token that ends the text.
    pub ignore_eos: bool,
}

/// Why a sequence ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// `n_predict` tokens were generated.
    Length,
    /// The model ended the text.
    EndOfGeneration,
    /// The context is full.
    ContextFull,
    /// The trace has reached its limit.
    TraceFull,
    /// The user asked to stop.
    Interrupted,
}

/// What was evaluated.
#[derive(Clone, Copy, Debug)]
pub struct Generated {
    /// Prompt tokens.
    pub n_prompt: usize,
    /// Generated tokens.
    pub n_generated: usize,
    /// Why it ended.
    pub stop: Stop,
}

/// Evaluates `prompt` and generates from it. Every generated token is evaluated too, the last included, so that a trace
/// holds the routing of all of them. `on_token` is told of each generated token; `interrupted` is looked at between
/// passes.
///
/// # Errors
/// A prompt that does not fit the context, a token outside the vocabulary, or a trace that cannot be written.
pub fn generate(
    session: &mut dyn Decode,
    sampler: &mut Sampler,
    prompt: &[u32],
    limits: &Limits,
    interrupted: &AtomicBool,
    mut on_token: impl FnMut(u32),
) -> Result<Generated> {
    let room = session.n_ctx() - session.n_past();
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    if prompt.len() > room {
        return Err(Error::ContextFull {
            tokens: prompt.len(),
            context: room,
            trained: session.n_ctx_train(),
        });
    }
    let mut done = Generated {
        n_prompt: 0,
        n_generated: 0,
        stop: Stop::Length,
    };
    let may_go_on = |session: &dyn Decode, n_tokens: usize| {
        if interrupted.load(Ordering::Relaxed) {
            return Err(Stop::Interrupted);
        }
        let room = session.has_room(n_tokens);
        if room { Ok(()) } else { Err(Stop::TraceFull) }
    };
    let stopped = |done: Generated, stop| Ok(Generated { stop, ..done });

    let mut next = None;
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

/// Records that [`generate`] leaves at most for a prompt of `n_prompt` tokens, where a pass over some tokens leaves at most
/// `records_per_pass`.
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
