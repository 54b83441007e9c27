//! Detects what a path argument is from its content.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;

use anyhow::{Context, bail};
use moe_files::text::without_byte_order_mark;
use moe_foreign::SAMPLE_SIZE;
use moe_gguf::content::Content;
use moe_trace::tables::dataset_parts;
use moe_trace::{TRACE_FILE, is_trace};

/// Kind of an input.
#[derive(Debug, PartialEq, Eq)]
pub enum Kind {
    /// A run directory.
    Run,
    /// A bare `trace.bin`.
    Trace,
    /// A GGUF model.
    Gguf,
    /// One Parquet file.
    Parquet,
    /// A directory of tables, or a Hive-partitioned dataset.
    Tables,
    /// JSON text, possibly a learn file.
    Json,
}

impl Kind {
    /// Detects the kind of input at a path.
    ///
    /// # Errors
    /// The path cannot be read, or its content is in no known format.
    pub fn of(path: &Path) -> anyhow::Result<Kind> {
        let found =
            fs::metadata(path).with_context(|| format!("cannot open {}", path.display()))?;
        if found.is_dir() {
            Kind::of_directory(path)
        } else if found.is_file() {
            Kind::of_file(path)
        } else {
            // Opening a pipe without a writer would block forever.
            bail!(
                "{} is neither a regular file nor a directory; pass a file or a directory",
                path.display()
            )
        }
    }

    fn of_directory(path: &Path) -> anyhow::Result<Kind> {
        if is_file(&path.join(TRACE_FILE))? {
            return Ok(Kind::Run);
        }
        if is_file(&path.join("routing.parquet"))? || !dataset_parts(path, "routing")?.is_empty() {
            return Ok(Kind::Tables);
        }
        bail!(
            "{} is neither a run directory (no trace.bin) nor a directory of tables (no routing.parquet, no routing/run=*/); \
             pass a directory that `record` or `parquet` wrote",
            path.display()
        );
    }

    fn of_file(path: &Path) -> anyhow::Result<Kind> {
        let mut head = Vec::new();
        File::open(path)
            .and_then(|file| file.take(SAMPLE_SIZE as u64).read_to_end(&mut head))
            .with_context(|| format!("cannot read {}", path.display()))?;
        if head.is_empty() {
            bail!(
                "{} is empty; pass a run directory, a trace, a table or a model",
                path.display()
            );
        }
        if without_byte_order_mark(&head)
            .trim_ascii_start()
            .starts_with(b"{")
        {
            return Ok(Kind::Json);
        }
        if is_trace(&head) {
            return Ok(Kind::Trace);
        }
        match Content::of(&head) {
            Some(Content::Gguf) => Ok(Kind::Gguf),
            Some(Content::Parquet) => Ok(Kind::Parquet),
            Some(content) => bail!(
                "{} is {content}, which cannot be read; {}",
                path.display(),
                match content.advice() {
                    "" => "pass a run, a trace, a table, a GGUF model or a learn file",
                    advice => advice,
                }
            ),
            None => bail!(
                "{} has an unknown format: it is not a GGUF model, a Parquet table, a trace of 1024-byte records, a learn file, or a \
                 format that `convert --list` lists",
                path.display()
            ),
        }
    }
}

/// Returns whether a regular file exists at a path. A missing permission is an error.
fn is_file(path: &Path) -> anyhow::Result<bool> {
    Ok(metadata(path)?.is_some_and(|found| found.is_file()))
}

/// Returns the metadata of a path, or `None` if it does not exist.
fn metadata(path: &Path) -> anyhow::Result<Option<fs::Metadata>> {
    match fs::metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error).with_context(|| format!("cannot open {}", path.display())),
    }
}
