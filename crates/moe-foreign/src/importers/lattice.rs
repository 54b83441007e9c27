//! JSONL of [lattice](https://github.com/ohdearquant/lattice): one line per token and layer.
//!
//! ```text
//! {"layer_idx":0,"token_idx":0,"selected_ids":[9,5],"gate_weights":[0.6,0.4]}
//! ```
//!
//! `token_idx` is the position of the token; `gate_weights` are the router weights of `selected_ids` and may be missing. Compared with
//! our records, the format lacks sequences, phases, timestamps and lanes.
//!
//! Definition: <https://github.com/ohdearquant/lattice/issues/903>

use moe_trace::{LayerId, RoutingRow, TokenId};
use serde::Deserialize;

use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

use super::shared::json_lines::{TokenOrder, first_line_has, for_each_line, zip_weights};

/// Importer of lattice's JSONL.
pub struct Lattice;

#[derive(Deserialize)]
struct Line {
    layer_idx: LayerId,
    token_idx: TokenId,
    selected_ids: Vec<i64>,
    gate_weights: Option<Vec<Option<f32>>>,
}

impl Importer for Lattice {
    fn name(&self) -> &'static str {
        "lattice"
    }

    fn description(&self) -> &'static str {
        "JSONL of lattice (layer_idx, token_idx, selected_ids, gate_weights): routing"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        first_line_has(sample, &["layer_idx", "token_idx", "selected_ids"])
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
                token_id: line.token_idx,
                ..RoutingRow::at_layer(line.layer_idx)
            };
            let experts = zip_weights(&line.selected_ids, line.gate_weights.as_deref())
                .map_err(|error| output.invalid(at(), error))?;
            order.check(&row, number, output);
            output.token(at, &row, experts)
        })?;
        output.note("phases are not recorded");
        Ok(())
    }
}
