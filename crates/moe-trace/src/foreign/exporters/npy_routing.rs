//! Routing as an array of NumPy, `[tokens, layers, top_k]`, as vLLM returns it.
//!
//! Only layers that have experts are counted, as in vLLM. A token that has no experts in a layer, as those of a prompt in a
//! last layer that computes only what is wanted, has -1 in its slots.

use std::collections::BTreeMap;
use std::io::Write;

use crate::foreign::binary::array::ElementType;
use crate::foreign::binary::npy;
use crate::foreign::{Export, ExportError, Exporter, RoutingRow, SinkError};

use super::tokens::for_each_token;

/// Numbers in an array, at most: it is filled in memory.
const MAX_NUMBERS: usize = 1 << 29;
/// No expert.
const EMPTY: i16 = -1;

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
        let layers = export.counts.layers();
        let layers: BTreeMap<u16, usize> = layers.keys().copied().zip(0..).collect();
        let mut extent = Extent::default();
        for_each_token(export, self.name(), |rows| extent.see(rows))?;
        let mut array = Array {
            top_k: extent.top_k,
            numbers: vec![
                EMPTY;
                extent
                    .numbers(&layers)
                    .map_err(|reason| self.unfit(reason))?
            ],
            layers,
        };
        for_each_token(export, self.name(), |rows| array.fill(rows))?;

        let shape = [extent.n_tokens, array.layers.len(), extent.top_k];
        out.write_all(&npy::header(ElementType::I16, &shape))?;
        for number in &array.numbers {
            out.write_all(&number.to_le_bytes())?;
        }
        let mut losses = vec!["phases, router weights, times and lanes were left out".to_owned()];
        if array.numbers.contains(&EMPTY) {
            losses.push("tokens without experts in a layer have -1 there".into());
        }
        if array
            .layers
            .iter()
            .any(|(&layer, &place)| usize::from(layer) != place)
        {
            losses.push("layers without experts are not counted, as in vLLM; name the model with --model where it is read".into());
        }
        Ok(losses)
    }
}

impl NpyRouting {
    fn unfit(&self, reason: String) -> ExportError {
        ExportError::Unfit {
            format: self.name(),
            reason,
        }
    }
}

/// How large an array the rows take.
#[derive(Default)]
struct Extent {
    n_tokens: usize,
    top_k: usize,
    sequence: Option<Option<u32>>,
}

impl Extent {
    fn see(&mut self, rows: &[RoutingRow]) -> Result<(), SinkError> {
        for row in rows {
            if *self.sequence.get_or_insert(row.sequence_id) != row.sequence_id {
                return Err(SinkError::Refused(
                    "the trace has several sequences and the array holds one; convert it to jsonl, or record one prompt".into(),
                ));
            }
            self.n_tokens = self.n_tokens.max(row.token_id as usize + 1);
            self.top_k = self.top_k.max(usize::from(row.slot) + 1);
        }
        Ok(())
    }

    fn numbers(&self, layers: &BTreeMap<u16, usize>) -> Result<usize, String> {
        let numbers = self
            .n_tokens
            .saturating_mul(layers.len())
            .saturating_mul(self.top_k);
        if numbers > MAX_NUMBERS {
            return Err(format!(
                "an array of {} tokens with {} layers and {} experts each is too large; convert the trace to jsonl",
                self.n_tokens,
                layers.len(),
                self.top_k
            ));
        }
        Ok(numbers)
    }
}

struct Array {
    top_k: usize,
    /// Place of each layer.
    layers: BTreeMap<u16, usize>,
    /// `[n_tokens][n_layer][top_k]`
    numbers: Vec<i16>,
}

impl Array {
    fn fill(&mut self, rows: &[RoutingRow]) -> Result<(), SinkError> {
        for row in rows {
            let layer = self.layers.get(&row.layer_id);
            let place = layer.and_then(|layer| {
                let token = row.token_id as usize * self.layers.len() + layer;
                self.numbers
                    .get_mut(token * self.top_k + usize::from(row.slot))
            });
            let Some(place) = place else {
                return Err(SinkError::Refused(
                    "the trace changed while it was read".into(),
                ));
            };
            if *place != EMPTY {
                return Err(SinkError::Refused(format!(
                    "token {} is in layer {} twice, so the trace has several sequences and does not tell them apart; the array holds one",
                    row.token_id, row.layer_id
                )));
            }
            *place = row.expert_id as i16; // below MAX_ID
        }
        Ok(())
    }
}
