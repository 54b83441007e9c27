//! Routing as an array of NumPy, `[tokens, layers, top_k]`, as vLLM returns it.
//!
//! There is a row for each hidden layer, so that its number is that of the block in the model. A token that has no experts in a
//! layer, because the layer is dense or computes only what is wanted of a prompt, has -1 in its slots.

use std::io::Write;

use moe_trace::{LayerId, RoutingRow, SinkError, TokenId};

use crate::binary::array::ElementType;
use crate::binary::npy;
use crate::{Export, ExportError, Exporter};

use super::rows_for_servers;
use super::tokens::for_each_token;

/// Numbers in an array, at most: it is filled in memory.
const MAX_NUMBERS: usize = 1 << 29;
/// No expert.
const EMPTY: i16 = -1;

/// Why a trace does not fit into an array.
#[derive(Debug, thiserror::Error)]
enum RowsFault {
    #[error(
        "the trace has several sequences and the array holds one; convert it to jsonl, or record one prompt"
    )]
    Sequences,
    #[error(
        "an array of {n_tokens} tokens with {n_layer} layers and {top_k} experts each is too large; convert the trace to jsonl"
    )]
    TooLarge {
        n_tokens: usize,
        n_layer: usize,
        top_k: usize,
    },
    #[error("the trace changed while it was read")]
    Changed,
    #[error(
        "token {token_id} is in layer {layer_id} twice, so the trace has several sequences and does not distinguish them; \
         the array holds one"
    )]
    Twice {
        token_id: TokenId,
        layer_id: LayerId,
    },
}

/// Array of routing.
pub struct NpyRouting;

impl Exporter for NpyRouting {
    fn name(&self) -> &'static str {
        "npy"
    }

    fn description(&self) -> &'static str {
        "array of NumPy: routing [tokens, layers, top_k], int16, as of vLLM; one sequence"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let (n_layer, left_out) = rows_for_servers(export);
        let mut extent = Extent {
            n_layer,
            ..Extent::default()
        };
        for_each_token(export, self.name(), |rows| extent.see(rows))?;
        let n_expert_used = export.n_expert_used().unwrap_or(0);
        extent.top_k = extent.top_k.max(n_expert_used as usize);
        let n_numbers = extent.numbers().map_err(|fault| ExportError::Unfit {
            format: self.name(),
            source: fault.into(),
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
        let mut losses = vec!["phases, router weights, times and lanes were left out".to_owned()];
        if array.numbers.contains(&EMPTY) {
            losses.push("tokens without experts in a layer have -1 there".into());
        }
        losses.extend(left_out);
        Ok(losses)
    }
}

/// How large an array the rows take.
#[derive(Default)]
struct Extent {
    n_tokens: usize,
    n_layer: usize,
    top_k: usize,
    sequence: Option<Option<u32>>,
}

impl Extent {
    fn see(&mut self, rows: &[RoutingRow]) -> Result<(), SinkError> {
        for row in rows
            .iter()
            .filter(|row| row.layer_id.index() < self.n_layer)
        {
            if *self.sequence.get_or_insert(row.sequence_id) != row.sequence_id {
                return Err(SinkError::Refused(RowsFault::Sequences.into()));
            }
            self.n_tokens = self.n_tokens.max(row.token_id.index() + 1);
            self.top_k = self.top_k.max(usize::from(row.slot) + 1);
        }
        Ok(())
    }

    fn numbers(&self) -> Result<usize, RowsFault> {
        let numbers = self
            .n_tokens
            .saturating_mul(self.n_layer)
            .saturating_mul(self.top_k);
        if numbers > MAX_NUMBERS {
            return Err(RowsFault::TooLarge {
                n_tokens: self.n_tokens,
                n_layer: self.n_layer,
                top_k: self.top_k,
            });
        }
        Ok(numbers)
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
                return Err(SinkError::Refused(RowsFault::Changed.into()));
            };
            if *place != EMPTY {
                let fault = RowsFault::Twice {
                    token_id: row.token_id,
                    layer_id: row.layer_id,
                };
                return Err(SinkError::Refused(fault.into()));
            }
            *place = i16::try_from(row.expert_id.0).expect("MAX_ID fits in 16 bits");
        }
        Ok(())
    }
}
