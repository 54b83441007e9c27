//! The ranking of Mesh-LLM, `ranking.csv`, a file a layer.
//!
//! Mesh-LLM's own ranking pools all layers, though expert 3 of one layer has nothing to do with expert 3 of another. Its reader
//! takes the first column for the expert whatever the header says, so a column for the layer would be misread; each file here is
//! a ranking that it reads, and says in a comment which layer it is of.

use std::io::{self, Write};

use crate::{ExpertCount, Export, ExportError, FilesExporter, LayerCounts};
use moe_trace::LayerId;

use super::{is_numbered, losses_of_counts};

/// Start of every ranking, up to the number of its layer.
const HEAD: &str = "# mesh-llm-moe-ranking=v1\n# layer=";

/// Rankings, `layer-000.csv` and so on.
pub struct MeshLlm;

impl FilesExporter for MeshLlm {
    fn name(&self) -> &'static str {
        "mesh-llm"
    }

    fn description(&self) -> &'static str {
        "directory of Mesh-LLM rankings (ranking.csv), one for each layer"
    }

    fn is_file_name(&self, name: &str) -> bool {
        is_numbered(name, "layer-", 3, ".csv")
    }

    fn head(&self) -> &'static str {
        HEAD
    }

    fn export(
        &self,
        export: &Export<'_>,
        create: &mut dyn FnMut(&str) -> io::Result<Box<dyn Write>>,
    ) -> Result<Vec<String>, ExportError> {
        let mut losses = losses_of_counts(export);
        for (layer, counts) in export.counts.layers() {
            let mut out = create(&format!("layer-{layer:03}.csv"))?;
            let has_masses = write_layer(layer, &counts, &mut out)?;
            out.flush()?;
            let note = "where router weights are not known, every choice weighs 1";
            if !has_masses && !losses.iter().any(|loss| loss == note) {
                losses.push(note.into());
            }
        }
        Ok(losses)
    }
}

/// Writes a ranking, the heaviest first; whether the router weights are known.
fn write_layer(layer: LayerId, counts: &LayerCounts, out: &mut dyn Write) -> io::Result<bool> {
    let has_masses = counts.experts.values().all(|tally| tally.mass.is_some());
    let mass = |tally: &ExpertCount| match tally.mass {
        Some(mass) if has_masses => mass,
        _ => tally.count as f64,
    };
    let mut ranked: Vec<_> = counts.experts.iter().collect();
    ranked.sort_by(|(_, a), (_, b)| mass(b).total_cmp(&mass(a)));
    let sum: f64 = counts.experts.values().map(mass).sum();

    writeln!(out, "{HEAD}{layer}")?;
    if !has_masses {
        writeln!(out, "# total_mass=selection_count")?;
    }
    writeln!(out, "expert_id,total_mass,mass_fraction,selection_count")?;
    for (expert, tally) in ranked {
        let mass = mass(tally);
        let fraction = if sum > 0.0 { mass / sum } else { 0.0 };
        writeln!(out, "{expert},{mass:.12},{fraction:.12},{}", tally.count)?;
    }
    Ok(has_masses)
}
