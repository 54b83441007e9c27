//! The formats of `--format`, and the encodings that each has.

use std::io::{self, Write};
use std::path::Path;

use anyhow::bail;
use clap::ValueEnum as _;
use moe_gguf::map::OffsetMap;
use moe_gguf::tensor_tracer;

use super::report::Survey;
use super::rows;
use crate::output::Format;

/// Format of the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MapFormat {
    /// One row per tensor or expert
    Rows,
    /// JSON report of the checks; tensors are identified by tensor_idx
    Report,
    /// memory-map.json of the TensorAccessLog tracer (github.com/ErsjanKeri/BSC)
    MemoryMap,
    /// CSV of the gguf-dump tool of the same tracer
    GgufDump,
}

/// The encoding of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileFormat {
    Text(Format),
    Parquet,
}

impl MapFormat {
    /// Returns the name on the command line.
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Returns whether the format contains the file of each offset.
    pub fn names_files(self) -> bool {
        matches!(self, MapFormat::Rows | MapFormat::Report)
    }

    /// Returns the only encoding of the format and its file extension, or `None` for rows, which have all encodings.
    fn only(self) -> Option<(Format, &'static str)> {
        match self {
            MapFormat::Rows => None,
            MapFormat::Report | MapFormat::MemoryMap => Some((Format::Json, "json")),
            MapFormat::GgufDump => Some((Format::Csv, "csv")),
        }
    }

    /// Returns the encoding on stdout: `wanted`, or the default.
    ///
    /// # Errors
    /// The format does not have the encoding.
    pub fn encoding(self, wanted: Option<Format>) -> anyhow::Result<Format> {
        match (self.only(), wanted) {
            (Some((only, name)), Some(wanted)) if wanted != only => {
                bail!(
                    "--format {} can only be printed as {name}; pass -o {name}, or omit -o",
                    self.name()
                )
            }
            (Some((only, _)), _) => Ok(only),
            (None, wanted) => Ok(wanted.unwrap_or(Format::Table)),
        }
    }

    /// Returns the encoding of a file from its extension.
    pub fn file_format(self, path: &Path) -> anyhow::Result<FileFormat> {
        let extension = path
            .extension()
            .map(|extension| extension.to_ascii_lowercase());
        let extension = extension
            .as_deref()
            .and_then(|extension| extension.to_str());
        match (self.only(), extension) {
            (Some((format, name)), Some(extension)) if name == extension => {
                Ok(FileFormat::Text(format))
            }
            (Some((_, name)), _) => {
                bail!(
                    "{}: with --format {} the extension must be .{name}",
                    path.display(),
                    self.name()
                )
            }
            (None, Some("csv")) => Ok(FileFormat::Text(Format::Csv)),
            (None, Some("json")) => Ok(FileFormat::Text(Format::Json)),
            (None, Some("jsonl")) => Ok(FileFormat::Text(Format::Jsonl)),
            (None, Some("md")) => Ok(FileFormat::Text(Format::Md)),
            (None, Some("parquet")) => Ok(FileFormat::Parquet),
            (None, _) => bail!(
                "{}: the extension must be .csv, .json, .jsonl, .md or .parquet",
                path.display()
            ),
        }
    }

    /// Writes the map in an encoding of the format.
    pub fn write(
        self,
        out: &mut dyn Write,
        format: Format,
        survey: &Survey,
        map: &OffsetMap,
    ) -> io::Result<()> {
        match self {
            MapFormat::Rows => rows::write(out, format, map),
            MapFormat::Report => write_json(out, survey),
            MapFormat::MemoryMap => write_json(out, &tensor_tracer::memory_map(survey.gguf, map)),
            MapFormat::GgufDump => tensor_tracer::write_gguf_dump_csv(out, survey.gguf, map),
        }
    }
}

fn write_json(out: &mut dyn Write, value: &impl serde::Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}
