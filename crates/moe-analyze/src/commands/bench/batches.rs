//! Tests with several sequences at the same time.

use std::time::{Duration, Instant};

use moe_engine::{BatchEntry, BatchSession};
use moe_trace::Phase;

use super::Test;

/// Runs a test once. Prompts follow each other in batches of `n_batch` tokens, and each pass of generation has a token of every
/// sequence. `tokens` are those of the first sequence, then those of the second one, and so on.
pub fn time(
    session: &mut dyn BatchSession,
    test: Test,
    tokens: &[u32],
    n_batch: usize,
) -> anyhow::Result<Duration> {
    for slot in 0..test.n_parallel {
        session.begin_slot(slot, slot as u32)?;
    }
    let entries = entries(test, tokens);
    let start = Instant::now();
    for batch in entries.chunks(test.pass_size(n_batch)) {
        session.decode_batch(batch)?;
    }
    Ok(start.elapsed())
}

/// The tokens in the order of their evaluation.
fn entries(test: Test, tokens: &[u32]) -> Vec<BatchEntry> {
    let (n, slots) = (test.n_measured(), 0..test.n_parallel);
    let phase = test.phase();
    let entry = |(slot, position): (usize, usize)| BatchEntry {
        slot,
        token: tokens[slot * n + position],
        position,
        phase,
        logits: phase == Phase::Generate || position + 1 == n,
    };
    match phase {
        Phase::Prompt => {
            let of_slot = |slot| (0..n).map(move |position| (slot, position));
            slots.flat_map(of_slot).map(entry).collect()
        }
        Phase::Generate => {
            let of_pass = |position| slots.clone().map(move |slot| (slot, position));
            (0..n).flat_map(of_pass).map(entry).collect()
        }
    }
}
