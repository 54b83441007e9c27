//! Output files: complete or absent, and never in the place of an input or of a file that was there before.

use std::fs;
use std::io::{self, BufWriter};
use std::ops::Deref;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::builder::{MapValueParser, PathBufValueParser, TypedValueParser, ValueParserFactory};
use moe_files::{AtomicFile, inputs, parent_of};
use moe_trace::{TRACE_FILE, buffers, graph, manifest, map_table, transfers};

/// A path that a command writes, a file or a directory. Every other path of a command line is an input.
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

/// Protects the inputs of a command line, and refuses outputs that would replace one of them or each other.
///
/// # Errors
/// An output is an input, lies inside an input run, or is or contains another output.
pub fn check_command_line(inputs: &[&Path], outputs: &[&OutputPath]) -> anyhow::Result<()> {
    // Also without outputs on the command line: `record` chooses a directory.
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

/// Protects an input, and all of the run if it is one of the run's own files.
fn protect(input: &Path) {
    if input.join(TRACE_FILE).is_file() {
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

/// The run that a file belongs to. Other files that lie in the directory of a run, such as prompts, do not belong to it.
fn run_of(file: &Path) -> Option<&Path> {
    let name = file.file_name()?;
    let is_of_run = [
        TRACE_FILE,
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

/// Whether a directory is a run, complete or not. A trace without any other file of a run may lie anywhere.
fn is_run(dir: &Path) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    let others = [
        manifest::FILE_NAME,
        buffers::FILE_NAME,
        map_table::FILE_NAME,
    ];
    has(TRACE_FILE) && others.into_iter().any(has)
}

/// Refuses outputs that are one file, or of which one lies inside another.
fn check_distinct(outputs: &[&OutputPath]) -> anyhow::Result<()> {
    for (i, a) in outputs.iter().enumerate() {
        for b in &outputs[..i] {
            let [place_a, place_b] = [a, b].map(|path| inputs::resolved(path));
            if place_a == place_b {
                bail!("{} is named for two outputs; name two files", a.display());
            }
            let (outer, inner) = if place_a.starts_with(&place_b) {
                (b, a)
            } else {
                (a, b)
            };
            if place_a.starts_with(&place_b) || place_b.starts_with(&place_a) {
                bail!(
                    "the output {} lies inside the output {}; name another place",
                    inner.display(),
                    outer.display()
                );
            }
        }
    }
    Ok(())
}

/// Refuses an output path that cannot be written, before any work is done for it.
pub fn check_output(path: &Path, force: bool) -> anyhow::Result<()> {
    inputs::check_output(path)?;
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => {
            bail!("{} is a directory; name a file inside it", path.display())
        }
        Ok(found) if !found.is_file() => {
            bail!(
                "{} is not a regular file; name another output",
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
        bail!("{} does not name a file; name one", path.display());
    }
    let parent = parent_of(path);
    if !parent.is_dir() {
        bail!(
            "the directory {} for {} does not exist; make it first",
            parent.display(),
            path.display()
        );
    }
    Ok(())
}

/// Refuses an output whose extension is not that of the one format that can be written.
pub fn require_extension(path: &Path, extension: &str) -> anyhow::Result<()> {
    let found = path.extension();
    if !found.is_some_and(|found| found.eq_ignore_ascii_case(extension)) {
        bail!(
            "{}: only .{extension} files are written there; name a .{extension} file",
            path.display()
        );
    }
    Ok(())
}

/// Writes a file from front to back; it appears under its path once it is complete.
///
/// `path` must have passed [`check_output`]. On an error it is as it was.
pub fn write_whole(
    path: &Path,
    force: bool,
    write: impl FnOnce(&mut BufWriter<AtomicFile>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    commit(vec![prepare(path, force, write)?])
}

/// As [`write_whole`], but the file appears under its path by [`commit`].
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

/// Puts complete files in their places: all outputs of a command at once, so that an error leaves none.
pub fn commit(files: Vec<AtomicFile>) -> anyhow::Result<()> {
    Ok(moe_files::commit_all(files)?)
}
