//! Reads learn files, or counts traces into learn files.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_analysis::Phases;
use moe_analysis::hotness::Hotness;
use moe_foreign::{Contents, ImportOptions, check_layers, check_model};
use moe_placement::learn::LearnFile;
use moe_trace::{ModelInfo, bounded};

use crate::context::Context;
use crate::counting;
use crate::inputs::Kind;
use crate::traces::{self, ImportArgs};

/// Reads learn files and adds their counts; `half_life` fades older files. Traces that `hotness` can count are also accepted, if they
/// match the model.
pub fn read_learn_files(
    paths: &[PathBuf],
    half_life: Option<f64>,
    options: &ImportOptions,
    ctx: &Context,
) -> anyhow::Result<LearnFile> {
    // Traces are counted first: a trace without a number of experts shows only the experts that were used.
    let mut counted: Vec<Option<Hotness>> = Vec::new();
    for path in paths {
        if is_learn_file(path)? {
            counted.push(None);
            continue;
        }
        let hotness = count(path, options, ctx)?;
        for earlier in counted.iter().flatten() {
            let checked = earlier.check_mergeable(&hotness);
            checked.with_context(|| path.display().to_string())?;
        }
        counted.push(Some(hotness));
    }
    let (mut n_expert, mut n_expert_used) = (0, 0);
    if counted.iter().any(Option::is_some) {
        // Learn files are read again below, to keep only a few of them in memory at a time.
        for (path, counted) in paths.iter().zip(&counted) {
            let (of_layer, of_token) = match counted {
                Some(hotness) => (hotness.n_expert(), hotness.n_expert_used()),
                None => numbers_of(&read_file(path, options)?),
            };
            n_expert = n_expert.max(of_layer);
            n_expert_used = n_expert_used.max(of_token);
        }
    }
    let inputs = paths.iter().zip(counted);
    let files = inputs.map(|(path, counted)| -> anyhow::Result<LearnFile> {
        match counted {
            Some(mut hotness) => {
                hotness.raise_inferred(n_expert, n_expert_used);
                Ok(hotness.learn_file(Phases::All)?)
            }
            None => read_file(path, options),
        }
    });
    // An infinite half-life means no fading.
    let merged = LearnFile::merge_with_decay(files, half_life.unwrap_or(f64::INFINITY))?;
    merged.context("no input; pass a learn file")
}

/// Returns the paths of learn files for an error about their sum.
pub fn names(paths: &[PathBuf]) -> String {
    let names = paths.iter().map(|path| path.display().to_string());
    names.collect::<Vec<_>>().join(", ")
}

/// Reads a learn file, or counts a trace into one.
pub fn read_learn_file(
    path: &Path,
    options: &ImportOptions,
    ctx: &Context,
) -> anyhow::Result<LearnFile> {
    if is_learn_file(path)? {
        return read_file(path, options);
    }
    Ok(count(path, options, ctx)?.learn_file(Phases::All)?)
}

/// Reads a learn file, which must match the model. Errors contain the path.
fn read_file(path: &Path, options: &ImportOptions) -> anyhow::Result<LearnFile> {
    let text = bounded::read_json(path)?;
    let file = LearnFile::parse(&text).with_context(|| path.display().to_string())?;
    if let Some(model) = &options.model {
        check_model(model, &model_info_of(&file), path)?;
        let observations = file.observations();
        let observations = observations.with_context(|| path.display().to_string())?;
        let layers = observations.iter().map(|observation| observation.layer);
        check_layers(model, layers, path)?;
    }
    Ok(file)
}

/// Counts a run, tables, or a trace of another tool. Errors contain the path.
fn count(path: &Path, options: &ImportOptions, ctx: &Context) -> anyhow::Result<Hotness> {
    if matches!(Kind::of(path), Ok(Kind::Gguf)) && traces::detect(path)?.is_none() {
        bail!(
            "{} is a model, not a learn file or a trace; pass the model with --model",
            path.display()
        );
    }
    counting::read(path, options, ctx)
}

/// Returns the numbers of experts per layer and per token in a learn file, 0 if missing.
fn numbers_of(file: &LearnFile) -> (u32, u32) {
    let number = |n: Option<u64>| n.and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
    (number(file.n_expert()), number(file.n_expert_used()))
}

/// Returns whether a path is a learn file. A live report of the fork is a learn file.
pub fn is_learn_file(path: &Path) -> anyhow::Result<bool> {
    Ok(matches!(Kind::of(path), Ok(Kind::Json))
        && traces::detect(path)?
            .is_none_or(|trace| trace.importer.contents() == Contents::LearnFile))
}

/// Rejects options that describe a trace if they apply to none of the inputs.
///
/// # Errors
/// All inputs already contain what the option provides, or the option has no meaning for them.
pub fn check_import_args(args: &ImportArgs, paths: &[PathBuf]) -> anyhow::Result<()> {
    let Some(option) = args.first_given() else {
        return Ok(());
    };
    let mut traces: Vec<&Path> = Vec::new();
    for path in paths {
        if !is_learn_file(path)? {
            traces.push(path);
        }
    }
    if traces.is_empty() {
        bail!("{option} applies to traces, but all inputs are learn files; omit the option");
    }
    args.check(&traces)
}

/// Returns the parameters of the model that a learn file contains.
fn model_info_of(file: &LearnFile) -> ModelInfo {
    let n_expert = file.n_expert().filter(|&n| n > 0);
    ModelInfo {
        n_expert: n_expert.map(|n| n.try_into().unwrap_or(u32::MAX)),
        ..ModelInfo::default()
    }
}
