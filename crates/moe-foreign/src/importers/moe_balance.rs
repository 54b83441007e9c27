//! moe-balance's JSONL: a line for each batch and layer, `{"layer":0,"batch_id":12,"origin_rows":[0,1],"topk_experts":[[9,5],[3,1]]}`,
//! perhaps with `topk_weights`, `request_id` and `source_file`.
//!
//! `origin_rows` are rows of devices, not positions. A batch is read as a sequence, which it often is; its tokens count from 0,
//! and a further line of the same batch and layer continues the count.

use std::collections::HashMap;

use moe_gguf::text::counted;
use moe_trace::RoutingRow;
use serde::Deserialize;

use crate::{At, ForeignError, Importer, Options, Output, Source};

use super::jsonl::{Nested, each_line, first_line_has, zip_weights};

/// moe-balance's JSONL.
pub struct MoeBalance;

#[derive(Deserialize)]
struct Line {
    layer: u16,
    batch_id: u32,
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
        _options: &Options,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        let mut n_tokens = HashMap::new();
        each_line(source, output, |line, number, output| {
            hand_over(line, number, &mut n_tokens, output)
        })?;
        output.note(
            "each batch is read as a sequence; origin_rows (rows of devices), request_id and source_file were left out; \
             phases are unknown",
        );
        Ok(())
    }
}

/// Hands over a line; `n_tokens` are the tokens of each batch and layer in the lines before it.
fn hand_over(
    line: &Line,
    number: u64,
    n_tokens: &mut HashMap<(u32, u16), u32>,
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
    let n_tokens = n_tokens.entry((line.batch_id, line.layer)).or_default();
    for experts in line.topk_experts.iter() {
        let row = RoutingRow {
            token_id: *n_tokens,
            sequence_id: Some(line.batch_id),
            ..RoutingRow::at_layer(line.layer)
        };
        let experts =
            zip_weights(experts, weights.next()).map_err(|fault| output.invalid(at(), fault))?;
        output.token(at, &row, experts)?;
        *n_tokens = n_tokens.saturating_add(1);
    }
    Ok(())
}
