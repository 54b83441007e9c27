//! JSON lines, one for each token and layer: `{"t":0,"layer":0,"experts":[3,1],"phase":"decode"}`.
//!
//! The keys are those of the simplest form that simulators read; `weights` and `seq` are added where they are known. A slot without
//! an expert is -1 with the weight `null`, so that the others keep their ranks.

use std::io::Write;

use moe_trace::{LayerId, Phase, RoutingRow, TokenId};
use serde::Serialize;

use crate::{Export, ExportError, Exporter};

use super::tokens::for_each_token;

/// No expert.
const EMPTY: i64 = -1;

/// JSON lines.
pub struct Jsonl;

#[derive(Serialize)]
struct Line {
    t: TokenId,
    layer: LayerId,
    experts: Vec<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<Vec<Option<f32>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    phase: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<u32>,
}

impl Exporter for Jsonl {
    fn name(&self) -> &'static str {
        "jsonl"
    }

    fn description(&self) -> &'static str {
        "JSON lines: a token in a layer with its experts, for simulators"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let mut has_empty = false;
        for_each_token(export, self.name(), |rows| {
            let Some(first) = rows.first() else {
                return Ok(());
            };
            // JSON has no number for one that is not finite.
            let weight = |row: &RoutingRow| row.weight.filter(|weight| weight.is_finite());
            let mut experts = Vec::with_capacity(rows.len());
            let mut weights = Vec::with_capacity(rows.len());
            for row in rows {
                let n_slots = usize::from(row.slot).max(experts.len());
                has_empty |= n_slots > experts.len();
                experts.resize(n_slots, EMPTY);
                weights.resize(n_slots, None);
                experts.push(row.expert_id.0.into());
                weights.push(weight(row));
            }
            let has_weights = rows.iter().all(|row| weight(row).is_some());
            let line = Line {
                t: first.token_id,
                layer: first.layer_id,
                experts,
                weights: Some(weights).filter(|_| has_weights),
                phase: first.phase.map(|phase| match phase {
                    Phase::Prompt => "prefill",
                    Phase::Generate => "decode",
                }),
                seq: first.sequence_id,
            };
            serde_json::to_writer(&mut *out, &line)?;
            Ok(out.write_all(b"\n")?)
        })?;
        let mut losses = vec!["times and lanes were left out".to_owned()];
        if has_empty {
            losses.push("slots without an expert have -1".into());
        }
        Ok(losses)
    }
}
