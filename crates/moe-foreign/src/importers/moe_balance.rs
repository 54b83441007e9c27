//! moe-balance's JSONL: a line for each batch and layer, `{"layer":0,"batch_id":12,"origin_rows":[0,1],"topk_experts":[[9,5],[3,1]]}`,
//! perhaps with `topk_weights`, `request_id` and `source_file`.
//!
//! `origin_rows` are rows of devices, not positions. A batch is read as a sequence, which it often is; its tokens count from 0,
//! and a further line of the same batch and layer continues the count. Batches of different `source_file`s are different ones.

use std::collections::{HashMap, HashSet};

use moe_gguf::text::counted;
use moe_trace::{LayerId, RoutingRow, TokenId};
use serde::Deserialize;

use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

use super::jsonl::{Nested, each_line, first_line_has, zip_weights};

/// moe-balance's JSONL.
pub struct MoeBalance;

#[derive(Deserialize)]
struct Line {
    layer: LayerId,
    batch_id: u32,
    source_file: Option<String>,
    topk_experts: Nested<i64>,
    topk_weights: Option<Nested<Option<f32>>>,
}

impl Importer for MoeBalance {
    fn name(&self) -> &'static str {
        "moe-balance"
    }

    fn description(&self) -> &'static str {
        "moe-balance's JSONL: a line for each batch and layer, with topk_experts"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        first_line_has(sample, &["layer", "batch_id", "topk_experts"])
    }

    fn import(
        &self,
        source: &Source,
        _options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        let mut batches = Batches::default();
        each_line(source, output, |line, number, output| {
            hand_over(line, number, &mut batches, output)
        })?;
        output.note(
            "each batch of a source_file is read as a sequence; origin_rows (rows of devices) and request_id were left out; \
             phases are unknown",
        );
        Ok(())
    }
}

/// The batches so far.
#[derive(Default)]
struct Batches {
    /// By source and batch id.
    sequences: HashMap<Option<String>, HashMap<u32, u32>>,
    taken: HashSet<u32>,
    /// Above all sequences that are taken; once there is none above, a lower one.
    next: u32,
    /// Tokens by sequence and layer.
    n_tokens: HashMap<(u32, LayerId), u32>,
}

impl Batches {
    /// The sequence of a line: the batch id, or another number if a batch of another source has that.
    fn sequence(&mut self, line: &Line) -> u32 {
        let known = self.sequences.get(&line.source_file);
        if let Some(&sequence) = known.and_then(|batches| batches.get(&line.batch_id)) {
            return sequence;
        }
        let is_free = self.taken.insert(line.batch_id);
        let sequence = if is_free {
            line.batch_id
        } else {
            while !self.taken.insert(self.next) {
                self.next = self.next.wrapping_add(1);
            }
            self.next
        };
        self.next = self.next.max(sequence.wrapping_add(1));
        let batches = self.sequences.entry(line.source_file.clone()).or_default();
        batches.insert(line.batch_id, sequence);
        sequence
    }
}

/// Hands over a line, which may continue a batch of the lines before it.
fn hand_over(
    line: &Line,
    number: u64,
    batches: &mut Batches,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let at = || At::Line(number);
    if let Some(weights) = &line.topk_weights
        && weights.len() != line.topk_experts.len()
    {
        let reason = format!(
            "topk_weights of {}, topk_experts of {}; the line is damaged",
            counted(weights.len(), "token"),
            line.topk_experts.len()
        );
        return Err(output.invalid(at(), reason));
    }
    let mut weights = line.topk_weights.iter().flat_map(Nested::iter);
    let sequence_id = batches.sequence(line);
    let n_tokens = batches
        .n_tokens
        .entry((sequence_id, line.layer))
        .or_default();
    for experts in line.topk_experts.iter() {
        let row = RoutingRow {
            token_id: TokenId(*n_tokens),
            sequence_id: Some(sequence_id),
            ..RoutingRow::at_layer(line.layer)
        };
        let experts =
            zip_weights(experts, weights.next()).map_err(|fault| output.invalid(at(), fault))?;
        output.token(at, &row, experts)?;
        *n_tokens = n_tokens.saturating_add(1);
    }
    Ok(())
}
