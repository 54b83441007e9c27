//! Rankings of [Mesh-LLM](https://github.com/Mesh-LLM/mesh-llm) (`ranking.csv`) with their layer in a comment: expert counts and router
//! weights of one layer per file.
//!
//! ```text
//! # mesh-llm-moe-ranking=v1
//! # layer=3
//! expert_id,total_mass,mass_fraction,selection_count
//! 5,2.750000000000,0.500000000000,4
//! ```
//!
//! `selection_count` is the number of tokens that selected the expert, `total_mass` the sum of its router weights. The comment
//! `# total_mass=selection_count` means that the weights are unknown. Rankings without `# layer=N` are rejected: Mesh-LLM
//! itself sums each expert id over all layers, which says nothing about a single layer. Compared with our records, the format
//! lacks tokens, order and phases.
//!
//! Definition: `mesh-llm moe analyze` in that repository; the layer comment is an addition of this program's exporter.

use std::path::Path;

use moe_trace::CountRow;

use crate::source::{Lines, sample_lines};
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

use super::shared::text::{Columns, LineError, has_columns, number, required_number};

/// Columns by which a ranking is recognized.
const REQUIRED: [&str; 3] = ["expert_id", "total_mass", "selection_count"];
/// The known columns. `mass_fraction` is redundant and not read.
const COLUMNS: [&str; 4] = [REQUIRED[0], REQUIRED[1], REQUIRED[2], "mass_fraction"];

/// Importer of rankings: a file, or a directory with one file per layer.
pub struct MeshLlm;

impl Importer for MeshLlm {
    fn name(&self) -> &'static str {
        "mesh-llm"
    }

    fn description(&self) -> &'static str {
        "Mesh-LLM rankings (ranking.csv) with a layer comment, a file or a directory: counts and router weights"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        sample_lines(sample)
            .find(|line| !line.starts_with('#'))
            .is_some_and(|line| has_columns(line, &REQUIRED))
    }

    fn takes_directories(&self) -> bool {
        true
    }

    fn import(
        &self,
        source: &Source,
        _options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            import_file(file, output)?;
        }
        Ok(())
    }
}

fn import_file(file: &Path, output: &mut Output<'_>) -> Result<(), ForeignError> {
    let mut lines = Lines::open(file)?;
    let (mut layer, mut has_masses) = (None, true);
    let mut columns: Option<Columns<4>> = None;
    while let Some((line, text)) = lines.next_line()? {
        let at = || Location::Line(line);
        if let Some(comment) = text.strip_prefix('#') {
            match comment.trim().split_once('=') {
                Some(("layer", number)) => layer = Some(number.to_owned()),
                Some(("total_mass", "selection_count")) => has_masses = false,
                _ => {}
            }
            continue;
        }
        let Some(columns) = &mut columns else {
            let found = Columns::of(text, COLUMNS, REQUIRED.len(), output);
            columns = Some(found.map_err(|error| lines.invalid(error))?);
            continue;
        };
        let layer = layer.as_deref().ok_or_else(|| {
            output.invalid(
                at(),
                "the ranking has no comment `# layer=N`: Mesh-LLM sums expert ids over all layers, which says nothing about a single \
                 layer; use one ranking per layer",
            )
        })?;
        let (expert, mass, count) = match read_row(columns, text) {
            Ok(row) => row,
            Err(error) => {
                lines.skip_truncated(lines.invalid(error), output)?;
                continue;
            }
        };
        let row = CountRow {
            layer_id: number("layer", layer).map_err(|error| output.invalid(at(), error))?,
            expert_id: output.expert_id(at, expert)?,
            phase: None,
            count,
            mass: Some(mass).filter(|_| has_masses),
        };
        output.count(at, &row)?;
    }
    Ok(())
}

/// Expert, mass and count.
fn read_row(columns: &mut Columns<4>, text: &str) -> Result<(u64, f64, u64), LineError> {
    let [expert, mass, count, _fraction] = columns.fields(text)?;
    let mass: f64 = required_number("total_mass", mass)?;
    if !mass.is_finite() {
        return Err(LineError::Format("total_mass is not finite"));
    }
    Ok((
        required_number("expert_id", expert)?,
        mass,
        required_number("selection_count", count)?,
    ))
}
