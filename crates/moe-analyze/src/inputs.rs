//! What a path argument is, told by content.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use moe_trace::{TRACE_FILE, TensorAccessLog, record};
use zerocopy::FromBytes;

/// What lies at a path.
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
    /// JSON text, perhaps a learn file.
    Json,
}

impl Kind {
    /// Looks at a path.
    ///
    /// # Errors
    /// There is nothing that this program knows.
    pub fn of(path: &Path) -> anyhow::Result<Kind> {
        let found =
            fs::metadata(path).with_context(|| format!("cannot open {}", path.display()))?;
        if found.is_dir() {
            Kind::of_directory(path)
        } else {
            Kind::of_file(path)
        }
    }

    fn of_directory(path: &Path) -> anyhow::Result<Kind> {
        if path.join(TRACE_FILE).is_file() {
            return Ok(Kind::Run);
        }
        if path.join("routing.parquet").is_file() || !dataset_parts(path, "routing")?.is_empty() {
            return Ok(Kind::Tables);
        }
        bail!(
            "{} is neither a run directory (no trace.bin) nor a directory of tables (no routing.parquet, no routing/run=*/); \
             give what `record` or `parquet` wrote",
            path.display()
        );
    }

    fn of_file(path: &Path) -> anyhow::Result<Kind> {
        let mut head = Vec::new();
        File::open(path)
            .and_then(|file| file.take(record::RECORD_SIZE as u64).read_to_end(&mut head))
            .with_context(|| format!("cannot read {}", path.display()))?;
        if head.is_empty() {
            bail!(
                "{} is empty; give a run directory, a trace, a table or a model",
                path.display()
            );
        }
        if head.starts_with(b"GGUF") {
            return Ok(Kind::Gguf);
        }
        if head.starts_with(b"PAR1") {
            return Ok(Kind::Parquet);
        }
        if head.trim_ascii_start().starts_with(b"{") {
            return Ok(Kind::Json);
        }
        if TensorAccessLog::ref_from_bytes(&head).is_ok_and(is_plausible) {
            return Ok(Kind::Trace);
        }
        bail!(
            "{} is not a file that is known here: no GGUF model, no Parquet table, no trace of 1024-byte records, no learn file",
            path.display()
        );
    }
}

/// Whether the first bytes of a file can be a record. A name in a trace is ended by a NUL and is text.
fn is_plausible(record: &TensorAccessLog) -> bool {
    record.timestamp_ns.get() != 0
        && usize::from(record.num_sources) <= record::MAX_SOURCES
        && usize::from(record.num_experts) <= record::MAX_EXPERTS
        && record.phase <= record::PHASE_GENERATE
        && record.dst_name_bytes().len() < record::NAME_SIZE
        && std::str::from_utf8(record.dst_name_bytes()).is_ok()
}

/// The Parquet files of one table in a dataset, `DIR/TABLE/run=ID/*.parquet`.
pub fn dataset_parts(dataset: &Path, table: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut parts = Vec::new();
    for run in directory_entries(&dataset.join(table))? {
        parts.extend(directory_entries(&run)?);
    }
    parts.retain(|part| {
        part.extension()
            .is_some_and(|extension| extension == "parquet")
    });
    Ok(parts)
}

/// The entries of a directory in order of their names; none where there is no directory.
fn directory_entries(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(path).and_then(|entries| {
        entries
            .map(|entry| Ok(entry?.path()))
            .collect::<std::io::Result<Vec<_>>>()
    });
    let mut entries = entries.with_context(|| format!("cannot list {}", path.display()))?;
    entries.sort();
    Ok(entries)
}
