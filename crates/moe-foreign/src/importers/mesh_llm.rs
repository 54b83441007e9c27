//! Rankings of Mesh-LLM that say which layer they are of: `# layer=3`, then
//! `expert_id,total_mass,mass_fraction,selection_count`.
//!
//! Mesh-LLM's own rankings pool all layers, and nothing can be told of a layer from them.

use std::path::Path;

use moe_trace::CountRow;

use crate::source::{Lines, sample_lines};
use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

use super::text::{Columns, TextFault, has_columns, required_number};

/// Columns by which a ranking is recognized.
const REQUIRED: [&str; 3] = ["expert_id", "total_mass", "selection_count"];
/// The fraction follows from the masses.
const COLUMNS: [&str; 4] = [REQUIRED[0], REQUIRED[1], REQUIRED[2], "mass_fraction"];

/// Rankings, a file or a directory of them.
pub struct MeshLlm;

impl Importer for MeshLlm {
    fn name(&self) -> &'static str {
        "mesh-llm"
    }

    fn description(&self) -> &'static str {
        "Mesh-LLM rankings (ranking.csv) that name their layer: counts with router weights"
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
        let at = || At::Line(line);
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
            columns = Some(found.map_err(|fault| lines.invalid(fault))?);
            continue;
        };
        let layer = layer.as_deref().ok_or_else(|| {
            output.invalid(
                at(),
                "the ranking does not name its layer (`# layer=N`): Mesh-LLM pools all layers, and a sum over layers says nothing about one of them",
            )
        })?;
        let (expert, mass, count) = match read_row(columns, text) {
            Ok(row) => row,
            Err(fault) => {
                lines.cut_or(lines.invalid(fault), output)?;
                continue;
            }
        };
        let row = CountRow {
            layer_id: layer
                .parse()
                .map_err(|_| output.invalid(at(), format!("layer {layer:?} is not a number")))?,
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
fn read_row(columns: &mut Columns<4>, text: &str) -> Result<(u64, f64, u64), TextFault> {
    let [expert, mass, count, _fraction] = columns.fields(text)?;
    let mass: f64 = required_number("total_mass", mass)?;
    if !mass.is_finite() {
        return Err(TextFault::Line("total_mass is not finite"));
    }
    Ok((
        required_number("expert_id", expert)?,
        mass,
        required_number("selection_count", count)?,
    ))
}
