//! What the command prints or writes, and in which formats.

use std::io::{self, Write};
use std::path::Path;

use anyhow::bail;
use clap::ValueEnum as _;
use moe_gguf::map::OffsetMap;
use moe_gguf::thesis;

use super::report::Survey;
use super::rows;
use crate::output::Format;

/// What is printed or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Form {
    /// A row a tensor or expert
    Rows,
    /// What the checks found, as JSON; tensors are named by their tensor_idx
    Report,
    /// The memory-map.json of the thesis's tensor tracer
    MemoryMap,
    /// The CSV of the thesis's gguf-dump
    GgufDump,
}

/// The format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileFormat {
    Text(Format),
    Parquet,
}

impl Form {
    /// How it is called on the command line.
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Whether it says in which file of the model an offset is.
    pub fn names_files(self) -> bool {
        matches!(self, Form::Rows | Form::Report)
    }

    /// The only format that a form has, and the extension of its files; none for rows, which have all.
    fn only(self) -> Option<(Format, &'static str)> {
        match self {
            Form::Rows => None,
            Form::Report | Form::MemoryMap => Some((Format::Json, "json")),
            Form::GgufDump => Some((Format::Csv, "csv")),
        }
    }

    /// The format on stdout, if `wanted` is one that the form has.
    pub fn format(self, wanted: Option<Format>) -> anyhow::Result<Format> {
        match (self.only(), wanted) {
            (Some((only, name)), Some(wanted)) if wanted != only => {
                bail!(
                    "--form {} has one format; pass -o {name}, or no -o",
                    self.name()
                )
            }
            (Some((only, _)), _) => Ok(only),
            (None, wanted) => Ok(wanted.unwrap_or(Format::Table)),
        }
    }

    /// The format of a file, by its extension.
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
                    "{}: --form {} has one format; name a .{name} file",
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
                "{}: no format of the map has that extension; name a .csv, .json, .jsonl, .md or .parquet file",
                path.display()
            ),
        }
    }

    /// Writes the form in one of its formats.
    pub fn write(
        self,
        out: &mut dyn Write,
        format: Format,
        survey: &Survey,
        map: &OffsetMap,
    ) -> io::Result<()> {
        match self {
            Form::Rows => rows::write(out, format, map),
            Form::Report => write_json(out, survey),
            Form::MemoryMap => write_json(out, &thesis::memory_map(survey.gguf, map)),
            Form::GgufDump => thesis::write_gguf_dump_csv(out, survey.gguf, map),
        }
    }
}

fn write_json(out: &mut dyn Write, value: &impl serde::Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}
