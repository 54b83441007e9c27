//! Writing learn files of the hot-cache runtime.

use std::io::Write;

use moe_placement::learn::{LayerCounts, LearnFile};

use crate::{Export, ExportError, Exporter};

/// Learn files.
pub struct Learn;

impl Exporter for Learn {
    fn name(&self) -> &'static str {
        "learn"
    }

    fn description(&self) -> &'static str {
        "learn file of the hot-cache runtime: counts"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let n_expert = export.n_expert() as usize;
        let layers = export.counts.layers();
        let n_expert_used = export.facts().n_expert_used.filter(|&n| n > 0);
        let passes_are_known = layers
            .values()
            .all(|layer| layer.calls.is_some_and(|n| n > 0));
        let counts: Vec<LayerCounts> = layers
            .into_iter()
            .map(|(layer, counts)| {
                let mut experts = vec![0; n_expert];
                for (&expert, tally) in &counts.experts {
                    if let Some(count) = experts.get_mut(expert as usize) {
                        *count = tally.count;
                    }
                }
                let tokens = counts.rows.unwrap_or(0);
                let tokens = match n_expert_used {
                    Some(k) if tokens == 0 => counts.total().div_ceil(k.into()),
                    _ => tokens,
                };
                let calls = counts.calls.filter(|&calls| calls > 0);
                LayerCounts {
                    layer: layer.into(),
                    calls: calls.unwrap_or_else(|| {
                        LayerCounts::calls_without_passes(tokens, counts.total())
                    }),
                    experts,
                }
            })
            .collect();
        let passes = counts.iter().map(|layer| layer.calls).max().unwrap_or(0);
        let file =
            LearnFile::from_counts(n_expert as u32, n_expert_used.unwrap_or(1), passes, counts);
        out.write_all(file.to_json().as_bytes())?;
        let mut losses =
            vec!["phases, tokens and router weights have no place in a learn file".into()];
        if !passes_are_known {
            losses.push("passes are not recorded: `calls` and `updates` count tokens".into());
        }
        if n_expert_used.is_none() {
            losses.push("the number of experts of a token is not recorded: each selection is a call with `n_expert_used` 1".into());
        }
        Ok(losses)
    }
}
