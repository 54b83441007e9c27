//! Rankings of [Mesh-LLM](https://github.com/Mesh-LLM/mesh-llm) (`ranking.csv`), one file per layer.
//!
//! The layout is described in [`crate::importers::mesh_llm`]. Mesh-LLM itself sums each expert id over all layers, although expert
//! 3 of one layer is unrelated to expert 3 of another. Its reader treats the first column as the expert id whatever the
//! header says, so it would misread a layer column. Therefore each layer is a separate file in Mesh-LLM's format, with the layer
//! in a comment. Compared with our records, the format lacks tokens, order and phases.

use std::io::{self, Write};

use crate::{ExpertCount, Export, ExportError, FilesExporter, LayerCounts};
use moe_trace::LayerId;

use super::{is_numbered, losses_of_counts};

/// Start of every file, before the layer number.
const HEAD: &str = "# mesh-llm-moe-ranking=v1\n# layer=";

/// Exporter of rankings: `layer-000.csv`, `layer-001.csv`, ...
pub struct MeshLlm;

impl FilesExporter for MeshLlm {
    fn name(&self) -> &'static str {
        "mesh-llm"
    }

    fn description(&self) -> &'static str {
        "directory of Mesh-LLM rankings (ranking.csv), one per layer: counts and router weights"
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
            let note = "router weights are unknown in some layers: each selected expert counts as weight 1";
            if !has_masses && !losses.iter().any(|loss| loss == note) {
                losses.push(note.into());
            }
        }
        Ok(losses)
    }
}

/// Writes the ranking of a layer, highest mass first; returns whether all router weights are known.
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
