//! What a cache is planned from: a plan, a learn file, or a trace.

use std::path::Path;

use anyhow::{Context as _, bail};
use moe_foreign::ImportOptions;
use moe_placement::learn::{LayerObservation, has_schema, is_usable};
use moe_trace::{ModelInfo, bounded};

use crate::context::Context;
use crate::inputs::Kind;
use crate::learn_files;
use crate::plan_file::PlanFile;
use crate::traces;

/// Contents of the file of `--hot-cache`.
pub enum Source {
    /// The output of `plan -o json`.
    Plan(PlanFile),
    /// Observations of a learn file or a trace. Never empty.
    Learn(Vec<LayerObservation>),
}

impl Source {
    /// Reads a plan, a learn file, or a trace of the model that `facts` describes.
    ///
    /// # Errors
    /// The file cannot be read, is of another model, or contains no experts.
    pub fn read(path: &Path, facts: ModelInfo, ctx: &Context) -> anyhow::Result<Source> {
        if is_plan(path)? {
            return Ok(Source::Plan(PlanFile::read(path)?));
        }
        let observations = observations(path, facts, ctx)?;
        if !is_usable(&observations) {
            bail!(
                "{} contains no activations; record a longer run",
                path.display()
            );
        }
        Ok(Source::Learn(observations))
    }
}

/// Returns the observations of a learn file or a trace; empty if it has no counts.
fn observations(
    path: &Path,
    facts: ModelInfo,
    ctx: &Context,
) -> anyhow::Result<Vec<LayerObservation>> {
    let options = ImportOptions {
        model: Some(facts),
        ..ImportOptions::default()
    };
    let file = learn_files::read_learn_file(path, &options, ctx)?;
    let observations = file.observations();
    observations.with_context(|| path.display().to_string())
}

/// Whether a file is JSON without the schema of a learn file, and not a trace.
///
/// # Errors
/// The file cannot be read, or is neither a plan nor a learn file.
pub fn is_plan(path: &Path) -> anyhow::Result<bool> {
    if Kind::of(path)? != Kind::Json || traces::detect(path)?.is_some() {
        return Ok(false);
    }
    let has_schema = has_schema(&bounded::read_json(path)?);
    let has_schema = has_schema.with_context(|| {
        format!(
            "{} is neither a plan nor a learn file; pass the output of `plan -o json` or `hotness --out`",
            path.display()
        )
    })?;
    Ok(!has_schema)
}
