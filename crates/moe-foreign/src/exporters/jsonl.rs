//! JSON lines, one for each token and layer: `{"t":0,"layer":0,"experts":[3,1],"phase":"decode"}`.
//!
//! The keys are those of the simplest form that simulators read; `weights` and `seq` are added where they are known.

use std::io::Write;

use moe_trace::Phase;
use serde::Serialize;

use crate::{Export, ExportError, Exporter};

use super::tokens::for_each_token;

/// JSON lines.
pub struct Jsonl;

#[derive(Serialize)]
struct Line {
    t: u32,
    layer: u16,
    experts: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<Vec<f32>>,
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
        for_each_token(export, self.name(), |rows| {
            let Some(first) = rows.first() else {
                return Ok(());
            };
            let line = Line {
                t: first.token_id,
                layer: first.layer_id,
                experts: rows.iter().map(|row| row.expert_id).collect(),
                // JSON has no number for one that is not finite.
                weights: rows
                    .iter()
                    .map(|row| row.weight.filter(|weight| weight.is_finite()))
                    .collect(),
                phase: first.phase.map(|phase| match phase {
                    Phase::Prompt => "prefill",
                    Phase::Generate => "decode",
                }),
                seq: first.sequence_id,
            };
            serde_json::to_writer(&mut *out, &line)?;
            Ok(out.write_all(b"\n")?)
        })?;
        Ok(vec!["times and lanes were left out".into()])
    }
}
