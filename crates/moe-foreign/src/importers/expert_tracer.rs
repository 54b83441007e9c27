//! The expert tracer of llama-prefetch.cpp: counts as JSON.
//!
//! What its code writes: `{"layers":[{"layer_id":0,"total_tokens":8,"experts":[{"expert_id":9,"activations":2,...}]}]}`, where
//! `total_tokens` is the number of activations (tokens × experts for a token). What its plan describes:
//! `{"total_tokens":2,"expert_activations":{"9":2},"per_layer":{"0":{"9":2}}}`.

use std::collections::BTreeMap;

use moe_trace::{CountRow, ExpertId, LayerId};
use serde::Deserialize;

use crate::{At, ForeignError, ImportOptions, Importer, Output, Source, json};

/// The expert tracer's JSON, both forms.
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
        "JSON of llama-prefetch.cpp's expert tracer: counts by layer, or by its planned form"
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
                } => hand_over(&layers, output)?,
                Document {
                    per_layer: Some(layers),
                    ..
                } => {
                    output.note(
                        "the planned form counts gate, up and down apart, so its counts may be three times the choices; \
                         shares are right",
                    );
                    hand_over_planned(&layers, output)?;
                }
                _ => {
                    let reason = "counts of experts without their layers; trace with per-layer counts switched on";
                    return Err(ForeignError::file(file, reason));
                }
            }
        }
        output.note("counts alone: order, tokens, phases and weights are not told");
        Ok(())
    }
}

fn hand_over(layers: &[TracerLayer], output: &mut Output<'_>) -> Result<(), ForeignError> {
    for (i, layer) in layers.iter().enumerate() {
        for (k, expert) in layer.experts.iter().enumerate() {
            let row = CountRow {
                layer_id: layer.layer_id,
                expert_id: expert.expert_id,
                phase: None,
                count: expert.activations,
                mass: None,
            };
            output.count(|| At::Element(format!("layers[{i}].experts[{k}]")), &row)?;
        }
        let counts = layer.experts.iter().map(|expert| expert.activations);
        let sum = counts.fold(0u64, u64::saturating_add);
        if layer.total_tokens.is_some_and(|total| total != sum) {
            output.note(format!(
                "layer {}: total_tokens is not the sum of its activations; the activations were taken",
                layer.layer_id
            ));
        }
    }
    Ok(())
}

fn hand_over_planned(
    layers: &BTreeMap<String, BTreeMap<String, u64>>,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    for (layer, experts) in layers {
        for (expert, &count) in experts {
            let at = || At::Element(format!("per_layer[{layer:?}][{expert:?}]"));
            let (Ok(layer_id), Ok(expert_id)) = (layer.parse(), expert.parse()) else {
                return Err(
                    output.invalid(at(), "a layer or expert is no number; the file is damaged")
                );
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
