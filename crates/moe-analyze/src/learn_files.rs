//! Learn files, read or counted from traces.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use moe_analysis::hotness::{Hotness, Phases};
use moe_foreign::{Contents, ImportOptions, check_model};
use moe_placement::learn::LearnFile;
use moe_trace::{Facts, bounded};

use crate::context::Context;
use crate::counting;
use crate::inputs::Kind;
use crate::traces::{self, ImportArgs};

/// Reads learn files and adds them, fading older ones if asked to. Anything that `hotness` counts does as well, if it can be of
/// the model.
pub fn read_learn_files(
    paths: &[PathBuf],
    half_life: Option<f64>,
    options: &ImportOptions,
    ctx: &Context,
) -> anyhow::Result<LearnFile> {
    // Traces are counted first: one that does not say how many experts there are shows no more than were used.
    let mut counted: Vec<Option<Hotness>> = Vec::new();
    for path in paths {
        if is_learn_file(path)? {
            counted.push(None);
            continue;
        }
        let hotness = count(path, options, ctx)?;
        for earlier in counted.iter().flatten() {
            let checked = earlier.check_beside(&hotness);
            checked.with_context(|| path.display().to_string())?;
        }
        counted.push(Some(hotness));
    }
    let (mut n_expert, mut n_expert_used) = (0, 0);
    if counted.iter().any(Option::is_some) {
        // Learn files are read again below, so that few of them are in memory at a time.
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
                hotness.raise_seen(n_expert, n_expert_used);
                Ok(hotness.learn_file(Phases::All)?)
            }
            None => read_file(path, options),
        }
    });
    // Without a half-life nothing fades, as if it had no end.
    let merged = LearnFile::merge_fading(files, half_life.unwrap_or(f64::INFINITY))?;
    merged.context("no input; name a learn file")
}

/// Reads one learn file, or makes it from what `hotness` counts.
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

/// Reads a learn file, which must be able to be of the model. Messages name the path.
fn read_file(path: &Path, options: &ImportOptions) -> anyhow::Result<LearnFile> {
    let text = bounded::read_json(path)?;
    let file = LearnFile::parse(&text).with_context(|| path.display().to_string())?;
    if let Some(model) = &options.model {
        check_model(model, &facts_of(&file), path)?;
    }
    Ok(file)
}

/// Counts a run, tables, or a trace of another tool. Messages name the path.
fn count(path: &Path, options: &ImportOptions, ctx: &Context) -> anyhow::Result<Hotness> {
    if matches!(Kind::of(path), Ok(Kind::Gguf)) && traces::detect(path)?.is_none() {
        bail!(
            "{}: it is a model; pass it with --model, and name a learn file",
            path.display()
        );
    }
    counting::read(path, options, ctx)
}

/// Experts of a layer and of a token, as far as a learn file has them; else 0.
fn numbers_of(file: &LearnFile) -> (u32, u32) {
    let number = |n: Option<u64>| n.and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
    (number(file.n_expert()), number(file.n_expert_used()))
}

/// Whether a path is a learn file, or a live report, which is one.
pub fn is_learn_file(path: &Path) -> anyhow::Result<bool> {
    Ok(matches!(Kind::of(path), Ok(Kind::Json))
        && traces::detect(path)?
            .is_none_or(|trace| trace.importer.contents() == Contents::LearnFile))
}

/// Refuses options that describe a trace where none of the inputs is one that they apply to.
///
/// # Errors
/// An option is named that all of them tell themselves, or have not.
pub fn check_import_args(args: &ImportArgs, paths: &[PathBuf]) -> anyhow::Result<()> {
    let Some(option) = args.named() else {
        return Ok(());
    };
    let mut traces: Vec<&Path> = Vec::new();
    for path in paths {
        if !is_learn_file(path)? {
            traces.push(path);
        }
    }
    if traces.is_empty() {
        bail!("{option} is for traces, and there are learn files alone; leave the option out");
    }
    args.check(&traces)
}

/// What a learn file says of its model.
fn facts_of(file: &LearnFile) -> Facts {
    let n_expert = file.n_expert().filter(|&n| n > 0);
    Facts {
        n_expert: n_expert.map(|n| n.try_into().unwrap_or(u32::MAX)),
        ..Facts::default()
    }
}
