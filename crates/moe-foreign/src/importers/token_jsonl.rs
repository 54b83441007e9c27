//! JSONL, a line for each token and layer: `{"t":0,"layer":0,"experts":[9,5],"phase":"decode"}`.
//!
//! The neutral form of several small tools. `phase` may be missing; `weights` (parallel to `experts`) and `seq` (the sequence)
//! are read where they are there, and written by this program's own export.

use moe_trace::{LayerId, Phase, RoutingRow, TokenId};
use serde::Deserialize;

use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

use super::jsonl::{TokenOrder, each_line, first_line_has, zip_weights};

/// JSONL per token and layer.
pub struct TokenJsonl;

#[derive(Deserialize)]
struct Line {
    t: TokenId,
    layer: LayerId,
    experts: Vec<i64>,
    phase: Option<String>,
    weights: Option<Vec<Option<f32>>>,
    seq: Option<u32>,
}

impl Importer for TokenJsonl {
    fn name(&self) -> &'static str {
        "jsonl"
    }

    fn description(&self) -> &'static str {
        "JSONL, a line for each token and layer: t, layer, experts, perhaps phase, weights, seq"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        first_line_has(sample, &["t", "layer", "experts"])
    }

    fn import(
        &self,
        source: &Source,
        _options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        let mut order = TokenOrder::default();
        each_line(source, output, |line: &Line, number, output| {
            let at = || At::Line(number);
            let row = RoutingRow {
                token_id: line.t,
                sequence_id: line.seq,
                phase: phase(line.phase.as_deref(), output),
                ..RoutingRow::at_layer(line.layer)
            };
            let experts = zip_weights(&line.experts, line.weights.as_deref())
                .map_err(|fault| output.invalid(at(), fault))?;
            order.take(&row, number, output);
            output.token(at, &row, experts)
        })?;
        Ok(())
    }
}

/// A phase as tools name it; an unknown name is noted, and the phase is unknown.
fn phase(name: Option<&str>, output: &mut Output<'_>) -> Option<Phase> {
    match name?.to_ascii_lowercase().as_str() {
        "prompt" | "prefill" | "pp" => Some(Phase::Prompt),
        "decode" | "generate" | "tg" => Some(Phase::Generate),
        other => {
            let shown: String = other.chars().take(32).collect();
            output.note(format!(
                "phase {shown:?} is not known and was taken as not told"
            ));
            None
        }
    }
}
