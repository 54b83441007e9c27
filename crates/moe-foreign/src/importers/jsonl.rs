//! JSONL with one line per token and layer: a common format of small cache simulators.
//!
//! ```text
//! {"t":0,"layer":0,"experts":[9,5],"phase":"decode","weights":[0.6,0.4],"seq":0}
//! ```
//!
//! `t` is the position of the token, `experts` are its selected experts, best first (negative: empty slot). `phase` (`prompt`,
//! `prefill`, `pp`, `decode`, `generate`, `tg`), `weights` (`null`: unknown) and `seq` (the sequence) are optional. Compared with our
//! records, the format lacks timestamps and lanes.
//!
//! Definition: the keys `t`, `layer`, `experts` and `phase` are those of `tools/route_sim.py` in
//! [alesha-pro/inference-optimization-playbook](https://github.com/alesha-pro/inference-optimization-playbook). This program adds
//! `weights` and `seq`.

use moe_trace::{LayerId, Phase, RoutingRow, TokenId};
use serde::Deserialize;

use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

use super::shared::json_lines::{TokenOrder, first_line_has, for_each_line, zip_weights};
use super::shared::text::shown;

/// Importer of JSONL per token and layer.
pub struct Jsonl;

#[derive(Deserialize)]
struct Line {
    t: TokenId,
    layer: LayerId,
    experts: Vec<i64>,
    phase: Option<String>,
    weights: Option<Vec<Option<f32>>>,
    seq: Option<u32>,
}

impl Importer for Jsonl {
    fn name(&self) -> &'static str {
        "jsonl"
    }

    fn description(&self) -> &'static str {
        "JSONL, one line per token and layer (t, layer, experts, optionally phase, weights, seq): routing"
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
        for_each_line(source, output, |line: &Line, number, output| {
            let at = || Location::Line(number);
            let row = RoutingRow {
                token_id: line.t,
                sequence_id: line.seq,
                phase: phase(line.phase.as_deref(), output),
                ..RoutingRow::at_layer(line.layer)
            };
            let experts = zip_weights(&line.experts, line.weights.as_deref())
                .map_err(|error| output.invalid(at(), error))?;
            order.check(&row, number, output);
            output.token(at, &row, experts)
        })?;
        Ok(())
    }
}

/// The phase with this name. An unknown name is an unknown phase, with a note.
fn phase(name: Option<&str>, output: &mut Output<'_>) -> Option<Phase> {
    match name?.to_ascii_lowercase().as_str() {
        "prompt" | "prefill" | "pp" => Some(Phase::Prompt),
        "decode" | "generate" | "tg" => Some(Phase::Generate),
        other => {
            output.note(format!(
                "phase {:?} is not known and is treated as unset",
                shown(other)
            ));
            None
        }
    }
}
