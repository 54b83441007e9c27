//! Rankings of Mesh-LLM that say which layer they are of: `# layer=3`, then
//! `expert_id,total_mass,mass_fraction,selection_count`.
//!
//! Mesh-LLM's own rankings pool all layers, and nothing can be told of a layer from them.

use std::path::Path;

use crate::foreign::{
    At, CountRow, ForeignError, Importer, Lines, Options, Output, Source, sample_lines,
};

const HEADER: &str = "expert_id,total_mass,mass_fraction,selection_count";

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
        sample_lines(sample).find(|line| !line.starts_with('#')) == Some(HEADER)
    }

    fn takes_directories(&self) -> bool {
        true
    }

    fn import(
        &self,
        source: &Source,
        _options: &Options,
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
    let (mut layer, mut has_masses, mut in_preamble) = (None, true, true);
    while let Some((line, text)) = lines.next_line()? {
        let at = || At::Line(line);
        if let Some(comment) = text.strip_prefix('#') {
            match comment.trim().split_once('=') {
                Some(("layer", number)) => layer = Some(number.to_owned()),
                Some(("total_mass", "selection_count")) => has_masses = false,
                _ => {}
            }
        } else if in_preamble {
            in_preamble = false;
        } else {
            let layer = layer.as_deref().ok_or_else(|| {
                output.invalid(
                    at(),
                    "the ranking does not say which layer it is of (`# layer=N`): Mesh-LLM pools all layers, which tells nothing of one",
                )
            })?;
            let Some((expert, mass, count)) = read_row(text) else {
                let reason = format!("not a row of {HEADER}; the file is damaged");
                lines.cut_or(lines.invalid(reason), output)?;
                continue;
            };
            let row = CountRow {
                layer_id: layer.parse().map_err(|_| {
                    output.invalid(at(), format!("layer {layer:?} is not a number"))
                })?,
                expert_id: output.id(at, "expert", expert)?.into(),
                phase: None,
                count,
                mass: Some(mass).filter(|_| has_masses),
            };
            output.count(at, &row)?;
        }
    }
    Ok(())
}

/// Expert, mass and count.
fn read_row(text: &str) -> Option<(u64, f64, u64)> {
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    let [expert, mass, _fraction, count] = fields[..] else {
        return None;
    };
    let mass: f64 = mass.parse().ok()?;
    Some((expert.parse().ok()?, mass, count.parse().ok()?)).filter(|_| mass.is_finite())
}
