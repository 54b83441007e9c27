//! Learn files and `/moe-layer-perf` responses of the [hot expert cache](https://github.com/adrianhoehne/llama.cpp) for llama.cpp.
//!
//! ```text
//! {"schema": "llama.cpp.moe_layer_perf.v1", "n_expert": 8, "n_expert_used": 2, "updates": 5,
//!  "layers": [{"layer": 0, "calls": 5, "experts": [[5, 4], [1, 3]], "hot_experts": ..., "cold_experts": ...}]}
//! ```
//!
//! `experts` are pairs of an expert id and the number of tokens that selected it. `calls` is the number of passes in which the layer
//! routed tokens. The old and the new schema name are read. Compared with our records, the format lacks tokens, order, phases
//! and router weights. Timings are ignored, and hot and cold counts are summed.
//!
//! Definition: `src/moe-hot-cache/` in that repository.

use moe_placement::learn::{Error, LearnFile, OLD_SCHEMA, SCHEMA};
use moe_trace::{CountRow, LayerRow, ModelInfo, bounded};

use crate::{Contents, ForeignError, ImportOptions, Importer, Location, Output, Source};

/// Importer of learn files.
pub struct Learn;

impl Importer for Learn {
    fn name(&self) -> &'static str {
        "learn"
    }

    fn description(&self) -> &'static str {
        "learn file or /moe-layer-perf response of the hot expert cache in llama.cpp: counts"
    }

    fn contents(&self) -> Contents {
        Contents::LearnFile
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        let text = String::from_utf8_lossy(sample);
        text.trim_start().starts_with('{')
            && text.contains("\"schema\"")
            && [SCHEMA, OLD_SCHEMA]
                .iter()
                .any(|schema| text.contains(&format!("\"{schema}\"")))
    }

    fn import(
        &self,
        source: &Source,
        _options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            import_text(&bounded::read_json(file)?, output)?;
        }
        output.note(
            "the format contains counts without tokens, order, phases and router weights; timings are ignored",
        );
        Ok(())
    }
}

fn import_text(text: &str, output: &mut Output<'_>) -> Result<(), ForeignError> {
    let invalid = |error: Error| output.invalid(Location::Element("/".into()), error);
    let file = LearnFile::parse(text).map_err(invalid)?;
    let observations = file.observations().map_err(invalid)?;
    let totals = file.totals().map_err(invalid)?;
    let number = |number: Option<u32>| number.filter(|&number| number > 0);
    output.model_info(&ModelInfo {
        n_expert: number(totals.n_expert),
        n_expert_used: number(totals.n_expert_used),
        ..ModelInfo::default()
    })?;
    for layer in &observations {
        let at = || Location::Element(format!("layer {}", layer.layer));
        let layer_id = output.layer_id(at, layer.layer.0.into())?;
        for expert in &layer.experts {
            let row = CountRow {
                layer_id,
                expert_id: expert.expert,
                phase: None,
                count: expert.hits(),
                mass: None,
            };
            output.count(at, &row)?;
        }
    }
    for (i, &(layer, calls)) in totals.calls.iter().enumerate() {
        let at = || Location::Element(format!("layers[{i}]"));
        let row = LayerRow {
            layer_id: output.layer_id(at, layer.0.into())?,
            phase: None,
            calls,
            n_tokens: None,
        };
        output.layer(at, &row)?;
    }
    Ok(())
}
