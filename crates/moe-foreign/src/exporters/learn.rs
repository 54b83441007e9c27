//! Learn file of the [hot expert cache](https://github.com/adrianhoehne/llama.cpp) for llama.cpp.
//!
//! The layout is described in [`crate::importers::learn`]. Compared with our records, the format lacks tokens, order, phases and
//! router weights. If the trace does not record passes, `calls` and `updates` count tokens. If the experts per token are
//! unknown too, each selected expert counts as a call, and `n_expert_used` is 1.

use std::collections::BTreeMap;
use std::io::Write;

use moe_placement::learn::{LayerCounts, LearnFile};
use moe_trace::LayerId;

use crate::{Export, ExportError, Exporter};

use super::note_n_expert;

/// Exporter of learn files.
pub struct Learn;

impl Exporter for Learn {
    fn name(&self) -> &'static str {
        "learn"
    }

    fn description(&self) -> &'static str {
        "learn file for the hot expert cache in llama.cpp: counts"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let n_expert = export.n_expert();
        let n_expert_used = export.n_expert_used();
        let mut passes_are_known = true;
        let mut layers: BTreeMap<LayerId, LayerCounts> = BTreeMap::new();
        for (layer, _, counts) in export
            .counts
            .iter()
            .filter(|(_, _, counts)| counts.total() > 0)
        {
            let used = export.model_info().n_expert_used_in(layer).unwrap_or(0);
            let tokens = counts
                .n_tokens
                .filter(|&n_tokens| n_tokens > 0)
                .unwrap_or_else(|| LayerCounts::tokens_of(counts.total(), used));
            let calls = counts.calls.filter(|&calls| calls > 0);
            passes_are_known &= calls.is_some();
            let calls =
                calls.unwrap_or_else(|| LayerCounts::calls_without_passes(tokens, counts.total()));
            let sum = layers.entry(layer).or_insert_with(|| LayerCounts {
                layer,
                calls: 0,
                experts: vec![0; n_expert as usize],
            });
            sum.calls = sum.calls.saturating_add(calls);
            for (&expert, tally) in &counts.experts {
                if let Some(count) = sum.experts.get_mut(expert.index()) {
                    *count = count.saturating_add(tally.count);
                }
            }
        }
        let counts: Vec<LayerCounts> = layers.into_values().collect();
        let passes = counts.iter().map(|layer| layer.calls).max().unwrap_or(0);
        let file = LearnFile::from_counts(n_expert, n_expert_used.unwrap_or(1), passes, counts);
        out.write_all(file.to_json().as_bytes())?;
        let mut losses = vec!["tokens, order, phases and router weights are lost".into()];
        if !passes_are_known {
            losses.push("passes are not recorded: `calls` and `updates` count tokens".into());
        }
        if n_expert_used.is_none() {
            losses.push("the number of experts per token is not recorded: each selected expert counts as a call, and `n_expert_used` is 1".into());
        }
        losses.extend(note_n_expert(export));
        Ok(losses)
    }
}
