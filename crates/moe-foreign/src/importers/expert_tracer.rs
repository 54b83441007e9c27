//! JSON of the expert usage tracer in [llama-prefetch.cpp](https://github.com/ernestuz-b/llama-prefetch.cpp): expert counts.
//!
//! ```text
//! {"layers":[{"layer_id":0,"total_tokens":8,"experts":[{"expert_id":9,"activations":2,"percentage":25.0}]}]}
//! ```
//!
//! `activations` is the number of tokens that selected the expert; `total_tokens` is the sum of the activations (tokens × experts per
//! token). The design document of the tracer describes another format, which is read too:
//!
//! ```text
//! {"total_tokens":2,"expert_activations":{"9":2},"per_layer":{"0":{"9":2}}}
//! ```
//!
//! It counts gate, up and down separately, so its counts may be three times the activations. Without `per_layer` it is rejected.
//! Compared with our records, both lack tokens, order, phases and router weights.
//!
//! Definition: `src/llama-expert-trace.cpp` in that repository.

use std::collections::BTreeMap;

use moe_trace::{CountRow, ExpertId, LayerId};
use serde::Deserialize;

use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source, json};

/// Importer of both JSON formats.
pub struct ExpertTracer;

#[derive(Deserialize)]
struct Document {
    layers: Option<Vec<TracerLayer>>,
    per_layer: Option<BTreeMap<String, BTreeMap<String, u64>>>,
}

#[derive(Deserialize)]
struct TracerLayer {
    layer_id: LayerId,
    total_tokens: Option<u64>,
    experts: Vec<Expert>,
}

#[derive(Deserialize)]
struct Expert {
    expert_id: ExpertId,
    activations: u64,
}

impl Importer for ExpertTracer {
    fn name(&self) -> &'static str {
        "expert-tracer"
    }

    fn description(&self) -> &'static str {
        "JSON of the expert usage tracer in llama-prefetch.cpp: counts"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        let text = String::from_utf8_lossy(sample);
        text.trim_start().starts_with('{')
            && (text.contains("\"expert_activations\"")
                || ["\"layers\"", "\"layer_id\"", "\"activations\""]
                    .iter()
                    .all(|key| text.contains(key)))
    }

    fn import(
        &self,
        source: &Source,
        _options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            match json::small_document(file)? {
                Document {
                    layers: Some(layers),
                    ..
                } => import_layers(&layers, output)?,
                Document {
                    per_layer: Some(layers),
                    ..
                } => {
                    output.note(
                        "the format counts gate, up and down separately, so counts may be three times the activations; fractions \
                         are correct",
                    );
                    import_per_layer(&layers, output)?;
                }
                _ => {
                    let reason =
                        "the counts have no layers; record the trace with counts per layer";
                    return Err(ForeignError::file(file, reason));
                }
            }
        }
        output.note("the format contains counts without tokens, order, phases and router weights");
        Ok(())
    }
}

fn import_layers(layers: &[TracerLayer], output: &mut Output<'_>) -> Result<(), ForeignError> {
    for (i, layer) in layers.iter().enumerate() {
        for (k, expert) in layer.experts.iter().enumerate() {
            let row = CountRow {
                layer_id: layer.layer_id,
                expert_id: expert.expert_id,
                phase: None,
                count: expert.activations,
                mass: None,
            };
            output.count(
                || Location::Element(format!("layers[{i}].experts[{k}]")),
                &row,
            )?;
        }
        let counts = layer.experts.iter().map(|expert| expert.activations);
        let sum = counts.fold(0u64, u64::saturating_add);
        if layer.total_tokens.is_some_and(|total| total != sum) {
            output.note(format!(
                "layer {}: total_tokens is not the sum of the activations and is ignored",
                layer.layer_id
            ));
        }
    }
    Ok(())
}

fn import_per_layer(
    layers: &BTreeMap<String, BTreeMap<String, u64>>,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    for (layer, experts) in layers {
        for (expert, &count) in experts {
            let at = || Location::Element(format!("per_layer[{layer:?}][{expert:?}]"));
            let (Ok(layer_id), Ok(expert_id)) = (layer.parse(), expert.parse()) else {
                let reason = "the layer or expert is not a number; the file is damaged";
                return Err(output.invalid(at(), reason));
            };
            let row = CountRow {
                layer_id,
                expert_id,
                phase: None,
                count,
                mass: None,
            };
            output.count(at, &row)?;
        }
    }
    Ok(())
}
