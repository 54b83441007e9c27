//! Writing learn files of the hot-cache runtime.

use std::io::Write;

use moe_placement::learn::{LayerCounts, LearnFile};
use moe_trace::foreign::{Export, ExportError, Exporter};

/// Learn files.
pub struct LearnExport;

impl Exporter for LearnExport {
    fn name(&self) -> &'static str {
        "learn"
    }

    fn description(&self) -> &'static str {
        "learn file of the hot-cache runtime: counts"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let n_expert = export.n_expert() as usize;
        let layers = export.counts.layers();
        let calls = layers.values().map(|layer| layer.calls.unwrap_or(0));
        let passes = calls.max().unwrap_or(0);
        let counts = layers.into_iter().map(|(layer, counts)| {
            let mut experts = vec![0; n_expert];
            for (&expert, tally) in &counts.experts {
                if let Some(count) = experts.get_mut(expert as usize) {
                    *count = tally.count;
                }
            }
            LayerCounts {
                layer: layer.into(),
                calls: counts.calls.unwrap_or(0),
                experts,
            }
        });
        let n_expert_used = export.facts().n_expert_used.unwrap_or(0);
        let file = LearnFile::from_counts(n_expert as u32, n_expert_used, passes, counts);
        out.write_all(file.to_json().as_bytes())?;
        let mut losses =
            vec!["phases, tokens and router weights have no place in a learn file".into()];
        if passes == 0 {
            losses.push("passes are not told, so `calls` and `updates` are 0".into());
        }
        Ok(losses)
    }
}
