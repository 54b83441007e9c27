//! Compares the new file with the old model: bytes and logits.

use std::io;

use moe_engine::{Decode, Logits};
use moe_executor::cpu::threads::{Threads, n_cores};
use moe_executor::recorder::Recorder;
use moe_executor::{CacheParams, CacheType, Model, Session};
use moe_files::text::counted;
use moe_gguf::Gguf;
use moe_gguf::check::check;
use moe_synth::relayout::Layout;
use moe_trace::Phase;

use crate::context::Context;
use crate::exit_status::ExitStatus;
use crate::output;

/// Tokens that both models generate after the prompt.
const N_PREDICT: usize = 8;

/// Maximum difference of a logit relative to the largest logit if experts were reordered: the softmax over experts is summed in
/// another order.
const TOLERANCE: f32 = 1e-4;

/// Compares the new file with the model, prints the findings, and returns whether they are equal.
pub fn verify(
    ctx: &Context,
    layout: &Layout,
    permuted: bool,
    [old, new]: [&Gguf; 2],
    prompt: &str,
) -> anyhow::Result<ExitStatus> {
    let mut found = layout.differences(old, new)?;
    let report = check(new);
    let refusals = report.llama_cpp_refuses.iter();
    found.extend(refusals.map(|refusal| refusal.describe(new)));
    let mut lines = vec![if found.is_empty() {
        format!(
            "bytes: {} and {} are identical{}",
            counted(new.tensors().len(), "tensor"),
            counted(new.metadata().len(), "key"),
            if permuted {
                ", except for the order of experts"
            } else {
                ""
            }
        )
    } else {
        "bytes: DIFFERENT".to_owned()
    }];
    lines.append(&mut found);
    let same_bytes = lines.len() == 1;

    let same_logits = match Model::load(old) {
        Ok(old) => {
            let difference = difference(&old, &Model::load(new)?, prompt)?;
            lines.push(difference.describe());
            difference.is_within(if permuted { TOLERANCE } else { 0.0 })
        }
        Err(error) => {
            ctx.note(format_args!(
                "warning: compared only bytes, because the model cannot run: {error}"
            ));
            true
        }
    };
    output::to_stdout(None, |stdout| -> io::Result<()> {
        lines.iter().try_for_each(|line| writeln!(stdout, "{line}"))
    })?;
    Ok(if same_bytes && same_logits {
        ExitStatus::Done
    } else {
        ExitStatus::Found
    })
}

/// Difference between the logits of two models.
struct Difference {
    positions: usize,
    n_vocab: usize,
    /// Number of logits that are not bit-identical.
    different: usize,
    largest_difference: f32,
    largest_logit: f32,
}

impl Difference {
    fn is_within(&self, share: f32) -> bool {
        self.different == 0 || self.largest_difference <= share * self.largest_logit
    }

    fn describe(&self) -> String {
        let (positions, n_vocab) = (self.positions, self.n_vocab);
        if self.different == 0 {
            return format!("logits: identical ({positions} positions × {n_vocab})");
        }
        format!(
            "logits: {} of {positions} × {n_vocab} differ, by at most {:e}; the largest logit is {}",
            self.different, self.largest_difference, self.largest_logit
        )
    }
}

/// Runs both models on the prompt and on the old model's continuation.
fn difference(old: &Model, new: &Model, prompt: &str) -> anyhow::Result<Difference> {
    let mut tokens = old.tokenizer().encode(prompt, true, false)?;
    let n_ctx = old.hparams().n_ctx_train;
    tokens.truncate(n_ctx.saturating_sub(N_PREDICT).max(1));
    if tokens.is_empty() {
        anyhow::bail!("the text of --prompt has no tokens; pass another text");
    }
    let (expected, continuation) = run(old, &tokens, None)?;
    let (found, _) = run(new, &tokens, Some(&continuation))?;

    let mut difference = Difference {
        positions: expected.len(),
        n_vocab: old.hparams().n_vocab,
        different: 0,
        largest_difference: 0.0,
        largest_logit: 0.0,
    };
    for (expected, found) in expected.iter().flatten().zip(found.iter().flatten()) {
        difference.largest_logit = difference.largest_logit.max(expected.abs());
        if expected.to_bits() != found.to_bits() {
            difference.different += 1;
            let apart = (expected - found).abs();
            let apart = if apart.is_nan() { f32::INFINITY } else { apart };
            difference.largest_difference = difference.largest_difference.max(apart);
        }
    }
    Ok(difference)
}

/// Returns the logits after the prompt and after each token of `continuation`, and these tokens. Without `continuation`, the most
/// likely tokens continue.
fn run(
    model: &Model,
    prompt: &[u32],
    continuation: Option<&[u32]>,
) -> anyhow::Result<(Vec<Vec<f32>>, Vec<u32>)> {
    let threads = Threads::new(n_cores())?;
    // Not rounded, so that a difference of keys or values changes the logits.
    let cache = CacheParams::of_type(CacheType::F32, prompt.len() + N_PREDICT);
    let mut session = Session::new(model, &threads, Recorder::new(None), cache)?;
    let mut logits = vec![
        session
            .decode(prompt, Phase::Prompt, Logits::Last)?
            .to_vec(),
    ];
    let mut tokens = Vec::new();
    for i in 0..N_PREDICT {
        let token = match continuation {
            Some(continuation) => continuation.get(i).copied().unwrap_or(0),
            None => most_likely(logits.last().map_or(&[], Vec::as_slice)),
        };
        tokens.push(token);
        logits.push(
            session
                .decode(&[token], Phase::Generate, Logits::Last)?
                .to_vec(),
        );
    }
    Ok((logits, tokens))
}

fn most_likely(logits: &[f32]) -> u32 {
    let best = (0u32..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(token, _)| token)
}
