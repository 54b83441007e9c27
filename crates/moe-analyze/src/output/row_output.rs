//! Options of commands that print rows or write them to a file.

use std::io::Write;

use super::Format;
use crate::context::Context;
use crate::files::{self, OutputPath};

/// Where rows go, and in which format.
#[derive(Debug, clap::Args)]
pub struct RowOutputArgs {
    /// Format of the rows on stdout [default: table]
    #[arg(short = 'o', long = "output", value_name = "FORMAT")]
    format: Option<Format>,
    /// Write the rows to a file; the extension selects the format: csv, json, jsonl, md
    #[arg(long, value_name = "FILE")]
    out: Option<OutputPath>,
    /// Replace the file of --out if it exists
    #[arg(long)]
    force: bool,
}

impl RowOutputArgs {
    /// Checks that the file can be written. Call it before any work is done.
    ///
    /// # Errors
    /// The extension selects no format, or the path cannot be written.
    pub fn check(&self) -> anyhow::Result<()> {
        if let Some(path) = &self.out {
            Format::of_path(path)?;
            files::check_output(path, self.force)?;
        }
        Ok(())
    }

    /// Path of the file, if it is given.
    #[cfg(feature = "sql")]
    pub fn file(&self) -> Option<&OutputPath> {
        self.out.as_ref()
    }

    /// The format of the rows on stdout, if it is given.
    pub fn format(&self) -> Option<Format> {
        self.format
    }

    /// Whether anything is printed on stdout: always without a file, and if a format is given.
    pub fn prints(&self) -> bool {
        self.out.is_none() || self.format.is_some()
    }

    /// Writes the rows to the file, if there is one.
    pub fn write_file(
        &self,
        ctx: &Context,
        write: impl FnOnce(&mut dyn Write, Format) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let Some(path) = &self.out else {
            return Ok(());
        };
        let format = Format::of_path(path)?;
        files::write(path, self.force, |file| write(file, format))?;
        ctx.note(format_args!("wrote {}", path.display()));
        Ok(())
    }
}
