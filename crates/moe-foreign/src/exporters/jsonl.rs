//! JSONL with one line per token and layer: `{"t":0,"layer":0,"experts":[3,1],"phase":"decode"}`.
//!
//! The layout is described in [`crate::importers::jsonl`]. `phase`, `weights` and `seq` are written if they are known. An
//! empty slot is -1 with the weight `null`, so that the other experts keep their ranks. Compared with our records, the format
//! lacks timestamps and lanes.

use std::io::Write;

use moe_trace::{LayerId, Phase, RoutingRow, TokenId};
use serde::Serialize;

use crate::{Export, ExportError, Exporter};

use super::tokens::for_each_token;

/// An empty slot.
const EMPTY: i64 = -1;

/// Exporter of JSONL per token and layer.
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
        "JSONL for simulators, one line per token and layer: routing"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let mut has_empty = false;
        for_each_token(export, self.name(), |rows| {
            let Some(first) = rows.first() else {
                return Ok(());
            };
            // JSON cannot represent numbers that are not finite.
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
        let mut losses =
            vec!["timestamps and lanes (where each expert was computed) are lost".to_owned()];
        if has_empty {
            losses.push("empty slots are written as expert -1".into());
        }
        Ok(losses)
    }
}
