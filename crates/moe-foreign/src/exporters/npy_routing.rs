//! Routing as a [NumPy](https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html) array `[tokens, layers, top_k]` of
//! int16, like the arrays that [vLLM](https://github.com/vllm-project/vllm) returns.
//!
//! Row i of a token is hidden layer i, which is block i of the model. All slots of a token are -1 in dense layers, and in layers that
//! compute only the requested outputs of a prompt. Compared with our records, the format lacks sequences, phases, router weights,
//! timestamps, lanes and layers of the MTP head.

use std::io::Write;

use moe_trace::{RoutingRow, SinkError};

use crate::binary::array::ElementType;
use crate::binary::npy;
use crate::{Export, ExportError, Exporter, UnsupportedTrace};

use super::rows_for_servers;
use super::tokens::for_each_token;

/// Maximum number of elements of an array, which is built in memory.
const MAX_NUMBERS: usize = 1 << 29;
/// An empty slot.
const EMPTY: i16 = -1;

/// Exporter of routing as a NumPy array.
pub struct NpyRouting;

impl Exporter for NpyRouting {
    fn name(&self) -> &'static str {
        "npy"
    }

    fn description(&self) -> &'static str {
        "NumPy array [tokens, layers, top_k], int16, like vLLM's; one sequence: routing"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let (n_layer, skipped) = rows_for_servers(export);
        let mut extent = Extent {
            n_layer,
            ..Extent::default()
        };
        for_each_token(export, self.name(), |rows| extent.include(rows))?;
        let n_expert_used = export.n_expert_used().unwrap_or(0);
        extent.top_k = extent.top_k.max(n_expert_used as usize);
        let n_numbers = extent
            .n_numbers()
            .map_err(|error| ExportError::Unsupported {
                format: self.name(),
                source: error.into(),
            })?;
        let mut array = Array {
            n_layer,
            top_k: extent.top_k,
            numbers: vec![EMPTY; n_numbers],
        };
        for_each_token(export, self.name(), |rows| array.fill(rows))?;

        let shape = [extent.n_tokens, n_layer, extent.top_k];
        out.write_all(&npy::header(ElementType::I16, &shape))?;
        for number in &array.numbers {
            out.write_all(&number.to_le_bytes())?;
        }
        let mut losses = vec!["phases, router weights, timestamps and lanes (where each expert was computed) are lost".to_owned()];
        if array.numbers.contains(&EMPTY) {
            losses.push("empty slots are written as expert -1".into());
        }
        losses.extend(skipped);
        Ok(losses)
    }
}

/// The size of the array for the rows so far.
#[derive(Default)]
struct Extent {
    n_tokens: usize,
    n_layer: usize,
    top_k: usize,
    sequence: Option<Option<u32>>,
}

impl Extent {
    fn include(&mut self, rows: &[RoutingRow]) -> Result<(), SinkError> {
        for row in rows
            .iter()
            .filter(|row| row.layer_id.index() < self.n_layer)
        {
            if *self.sequence.get_or_insert(row.sequence_id) != row.sequence_id {
                let hint = "convert it to jsonl, or record one prompt";
                return Err(SinkError::Refused(
                    UnsupportedTrace::Sequences { hint }.into(),
                ));
            }
            self.n_tokens = self.n_tokens.max(row.token_id.index() + 1);
            self.top_k = self.top_k.max(usize::from(row.slot) + 1);
        }
        Ok(())
    }

    fn n_numbers(&self) -> Result<usize, UnsupportedTrace> {
        let n_numbers = self
            .n_tokens
            .saturating_mul(self.n_layer)
            .saturating_mul(self.top_k);
        if n_numbers > MAX_NUMBERS {
            return Err(UnsupportedTrace::TooLarge {
                n_tokens: self.n_tokens,
                n_layer: self.n_layer,
                top_k: self.top_k,
            });
        }
        Ok(n_numbers)
    }
}

struct Array {
    n_layer: usize,
    top_k: usize,
    /// `[n_tokens][n_layer][top_k]`
    numbers: Vec<i16>,
}

impl Array {
    fn fill(&mut self, rows: &[RoutingRow]) -> Result<(), SinkError> {
        for row in rows {
            let layer = row.layer_id.index();
            if layer >= self.n_layer {
                continue;
            }
            let token = row.token_id.index() * self.n_layer + layer;
            let place = token * self.top_k + usize::from(row.slot);
            let Some(place) = self.numbers.get_mut(place) else {
                return Err(SinkError::Refused(UnsupportedTrace::Changed.into()));
            };
            if *place != EMPTY {
                let error = UnsupportedTrace::RepeatedToken {
                    token_id: row.token_id,
                    layer_id: row.layer_id,
                };
                return Err(SinkError::Refused(error.into()));
            }
            *place = i16::try_from(row.expert_id.0).expect("MAX_ID fits in 16 bits");
        }
        Ok(())
    }
}
