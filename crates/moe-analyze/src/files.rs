//! Output files. They appear only when they are complete, and never replace an input, or an existing file without `--force`.

use std::fs;
use std::io::{self, BufWriter};
use std::ops::Deref;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::builder::{MapValueParser, PathBufValueParser, TypedValueParser, ValueParserFactory};
use moe_files::{AtomicFile, check_link, inputs, parent_of};
use moe_trace::{REST_FILE, TRACE_FILE, buffers, graph, manifest, map_table, transfers};

/// The path of an output file or directory. All other paths of a command line are inputs.
#[derive(Debug, Clone)]
pub struct OutputPath(PathBuf);

impl Deref for OutputPath {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl AsRef<Path> for OutputPath {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl ValueParserFactory for OutputPath {
    type Parser = MapValueParser<PathBufValueParser, fn(PathBuf) -> OutputPath>;

    fn value_parser() -> Self::Parser {
        PathBufValueParser::new().map(OutputPath)
    }
}

/// Protects the inputs of a command line, and rejects outputs that would replace an input or another output.
///
/// # Errors
/// An output is an input, is inside an input directory, or is or contains another output.
pub fn check_command_line(inputs: &[&Path], outputs: &[&OutputPath]) -> anyhow::Result<()> {
    // Needed without outputs on the command line, too: `record` chooses a directory.
    for input in inputs {
        protect(input);
        for shard in moe_gguf::shard_paths(input) {
            inputs::protect(&shard);
        }
    }
    for output in outputs {
        inputs::check_output(output)?;
    }
    check_distinct(outputs)
}

/// Protects an input. Nothing can be added to a directory: it would become a part of the input. If the input is a file of a run,
/// protects the run directory.
fn protect(input: &Path) {
    if input.is_dir() {
        return inputs::protect_directory(input);
    }
    inputs::protect(input);
    let target = input.canonicalize().ok();
    for path in [Some(input), target.as_deref()].into_iter().flatten() {
        if let Some(run) = run_of(path).filter(|_| path.is_file()) {
            inputs::protect_directory(run);
        }
    }
}

/// Returns the run directory that a file belongs to. Other files in a run directory, such as prompts, do not belong to the run.
fn run_of(file: &Path) -> Option<&Path> {
    let name = file.file_name()?;
    let is_of_run = [
        TRACE_FILE,
        REST_FILE,
        manifest::FILE_NAME,
        buffers::FILE_NAME,
        transfers::FILE_NAME,
        map_table::FILE_NAME,
    ]
    .iter()
    .any(|&own| name == own);
    let dir = parent_of(file);
    match dir.file_name() {
        _ if is_of_run => Some(dir),
        Some(name) if name == graph::DIRECTORY => Some(parent_of(dir)),
        _ => None,
    }
    .filter(|dir| is_run(dir))
}

/// Returns whether a directory is a run, complete or not. A trace alone does not make a directory a run.
fn is_run(dir: &Path) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    let others = [
        manifest::FILE_NAME,
        buffers::FILE_NAME,
        map_table::FILE_NAME,
    ];
    has(TRACE_FILE) && others.into_iter().any(has)
}

/// Rejects two outputs with the same path, and an output inside another output.
fn check_distinct(outputs: &[&OutputPath]) -> anyhow::Result<()> {
    for (i, a) in outputs.iter().enumerate() {
        for b in &outputs[..i] {
            let [place_a, place_b] = [a, b].map(|path| inputs::resolved(path));
            if place_a == place_b {
                bail!(
                    "{} is the path of two outputs; use two different paths",
                    a.display()
                );
            }
            let (outer, inner) = if place_a.starts_with(&place_b) {
                (b, a)
            } else {
                (a, b)
            };
            if place_a.starts_with(&place_b) || place_b.starts_with(&place_a) {
                bail!(
                    "the output {} is inside the output {}; use another path",
                    inner.display(),
                    outer.display()
                );
            }
        }
    }
    Ok(())
}

/// Rejects an output path that cannot be written, before any work is done.
pub fn check_output(path: &Path, force: bool) -> anyhow::Result<()> {
    inputs::check_output(path)?;
    check_link(path)?;
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => {
            bail!("{} is a directory; use the path of a file", path.display())
        }
        Ok(found) if !found.is_file() => {
            bail!(
                "{} is not a regular file; use another output path",
                path.display()
            )
        }
        _ if !force && path.symlink_metadata().is_ok() => {
            bail!(moe_files::Error::Exists {
                path: path.to_owned()
            })
        }
        _ => {}
    }
    if path.file_name().is_none() {
        bail!(
            "{} has no file name; use the path of a file",
            path.display()
        );
    }
    let parent = parent_of(path);
    if !parent.is_dir() {
        bail!(
            "the directory {} of {} does not exist; create it first",
            parent.display(),
            path.display()
        );
    }
    Ok(())
}

/// Rejects an output directory that contains an input directory. [`check_command_line`] rejects the input directory itself.
pub fn check_output_directory(out: &Path, input: &Path) -> anyhow::Result<()> {
    if input.is_dir() && inputs::resolved(input).starts_with(inputs::resolved(out)) {
        bail!(
            "the output {} contains the input {}; use another path",
            out.display(),
            input.display()
        );
    }
    Ok(())
}

/// Rejects an output path with another extension than that of the output's only format.
pub fn require_extension(path: &Path, extension: &str) -> anyhow::Result<()> {
    let found = path.extension();
    if !found.is_some_and(|found| found.eq_ignore_ascii_case(extension)) {
        bail!("{}: the extension must be .{extension}", path.display());
    }
    Ok(())
}

/// Writes a file, which appears at `path` when it is complete.
///
/// `path` must have passed [`check_output`]. After an error, an earlier file at `path` is unchanged.
pub fn write(
    path: &Path,
    force: bool,
    write: impl FnOnce(&mut BufWriter<AtomicFile>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    commit(vec![prepare(path, force, write)?])
}

/// Like [`write()`], but the file appears at its path on [`commit`].
pub fn prepare(
    path: &Path,
    force: bool,
    write: impl FnOnce(&mut BufWriter<AtomicFile>) -> anyhow::Result<()>,
) -> anyhow::Result<AtomicFile> {
    let mut out = BufWriter::new(AtomicFile::create(path, force)?);
    write(&mut out)
        .and_then(|()| Ok(out.into_inner().map_err(io::IntoInnerError::into_error)?))
        .with_context(|| format!("writing {}", path.display()))
}

/// Moves complete files to their paths: all outputs of a command or none.
pub fn commit(files: Vec<AtomicFile>) -> anyhow::Result<()> {
    Ok(moe_files::commit_all(files)?)
}
