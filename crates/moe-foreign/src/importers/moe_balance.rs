//! JSONL of [moe-balance](https://github.com/johanna-rock/moe-balance): one line per batch and layer.
//!
//! ```text
//! {"layer":0,"batch_id":12,"origin_rows":[0,1],"topk_experts":[[9,5],[3,1]],"topk_weights":[[0.6,0.4],[0.7,0.3]]}
//! ```
//!
//! `topk_experts` are the selected experts of each token. `topk_weights`, `request_id` and `source_file` are optional. A batch of a
//! `source_file` is read as a sequence, whose tokens are numbered from 0; a further line of the same batch and layer continues the
//! numbers. `origin_rows` are rows of devices, not positions, and are ignored. Compared with our records, the format lacks token
//! positions, phases, timestamps and lanes.
//!
//! Definition: `sim/trace_format.md` in that repository.

use std::collections::{HashMap, HashSet};

use moe_files::text::counted;
use moe_trace::{LayerId, RoutingRow, TokenId};
use serde::Deserialize;

use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

use super::shared::json_lines::{Nested, first_line_has, for_each_line, zip_weights};

/// Importer of moe-balance's JSONL.
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
        "JSONL of moe-balance, one line per batch and layer (layer, batch_id, topk_experts): routing"
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
        for_each_line(source, output, |line, number, output| {
            import_line(line, number, &mut batches, output)
        })?;
        output.note(
            "each batch of a source_file is read as a sequence; origin_rows and request_id are ignored; phases are not recorded",
        );
        Ok(())
    }
}

/// The batches so far.
#[derive(Default)]
struct Batches {
    /// Sequence by source file and batch id.
    sequences: HashMap<Option<String>, HashMap<u32, u32>>,
    used: HashSet<u32>,
    /// Candidate for the next sequence: the highest used one + 1, or after an overflow a lower number.
    next: u32,
    /// Number of tokens by sequence and layer.
    n_tokens: HashMap<(u32, LayerId), u32>,
}

impl Batches {
    /// The sequence of a line: its batch id, or another number if a batch of another source file uses that id.
    fn sequence(&mut self, line: &Line) -> u32 {
        let known = self.sequences.get(&line.source_file);
        if let Some(&sequence) = known.and_then(|batches| batches.get(&line.batch_id)) {
            return sequence;
        }
        let is_free = self.used.insert(line.batch_id);
        let sequence = if is_free {
            line.batch_id
        } else {
            while !self.used.insert(self.next) {
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

/// Passes on the tokens of a line, which may continue a batch of earlier lines.
fn import_line(
    line: &Line,
    number: u64,
    batches: &mut Batches,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let at = || Location::Line(number);
    if let Some(weights) = &line.topk_weights
        && weights.len() != line.topk_experts.len()
    {
        let reason = format!(
            "topk_weights has {}, but topk_experts has {}; the line is damaged",
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
            zip_weights(experts, weights.next()).map_err(|error| output.invalid(at(), error))?;
        output.token(at, &row, experts)?;
        *n_tokens = n_tokens.saturating_add(1);
    }
    Ok(())
}
