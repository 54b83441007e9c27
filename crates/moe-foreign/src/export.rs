//! Writing traces for other tools.

use std::io::{self, Write};

use moe_trace::{Facts, Run, Sink};

use crate::counts::Counts;
use crate::error::ForeignError;
use crate::input::Input;
use crate::output::Summary;
use crate::{ImportOptions, Records};

/// Writes one foreign format.
pub trait Exporter: Sync {
    /// Short name, as `--to` takes it; that of the importer of the same format.
    fn name(&self) -> &'static str;

    /// One line: what the format is and who reads it.
    fn description(&self) -> &'static str;

    /// Writes `export` to `out` from front to back; returns what the format could not hold, for the user.
    ///
    /// # Errors
    /// [`ExportError`]; what was written so far is then dropped.
    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError>;
}

/// Writes one foreign format that is a directory of files.
pub trait FilesExporter: Sync {
    /// As [`Exporter::name`].
    fn name(&self) -> &'static str;

    /// As [`Exporter::description`].
    fn description(&self) -> &'static str;

    /// Whether [`FilesExporter::export`] could create a file of that name.
    fn is_file_name(&self, name: &str) -> bool;

    /// The bytes with which every file of [`FilesExporter::export`] starts.
    fn head(&self) -> &'static str;

    /// Writes `export` to files, each of which `create` opens by its name, one after the other; returns what the format could
    /// not hold, for the user.
    ///
    /// # Errors
    /// As [`Exporter::export`].
    fn export(
        &self,
        export: &Export<'_>,
        create: &mut dyn FnMut(&str) -> io::Result<Box<dyn Write>>,
    ) -> Result<Vec<String>, ExportError>;
}

/// Why a trace could not be written in a format.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The trace has counts alone, and the format holds tokens in order.
    #[error(
        "{format} holds tokens in their order, and a trace of {from} has counts alone; convert it to a format of counts"
    )]
    NoOrder {
        /// The format to be written.
        format: &'static str,
        /// The format that was read.
        from: &'static str,
    },
    /// The format needs what the trace does not contain.
    #[error("{format} needs {what}, which the trace does not contain; {hint}")]
    Missing {
        /// The format to be written.
        format: &'static str,
        /// What is needed.
        what: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// The trace does not fit into the format.
    #[error("{format}: {source}")]
    Unfit {
        /// The format to be written.
        format: &'static str,
        /// What does not fit, and what to do.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The trace could not be read.
    #[error(transparent)]
    Read(#[from] ForeignError),
    /// The file could not be written.
    #[error("cannot write: {0}")]
    Write(#[from] std::io::Error),
}

/// A trace to be written elsewhere: what is known of it as a whole, and its rows as often as they are wanted.
pub struct Export<'a> {
    input: &'a Input,
    options: &'a ImportOptions,
    /// The records of another tool's trace of every operation.
    records: Option<Records>,
    /// What was read, model facts and notes included.
    pub summary: Summary,
    /// Its counts, from rows or from counts.
    pub counts: Counts,
}

impl<'a> Export<'a> {
    /// Reads `input` once, for its counts.
    ///
    /// # Errors
    /// As [`Input::read`].
    pub fn new(input: &'a Input, options: &'a ImportOptions) -> Result<Self, ForeignError> {
        let mut counts = Counts::default();
        let summary = input.read(options, &mut counts)?;
        let records = match input {
            Input::Foreign(trace) => trace.importer.records(&trace.source, options)?,
            _ => None,
        };
        Ok(Self {
            input,
            options,
            records,
            summary,
            counts,
        })
    }

    /// The run, where the trace contains every operation.
    pub fn run(&self) -> Option<&Run> {
        match self.input {
            Input::Run(run) => Some(run),
            _ => self.records.as_ref().map(|records| &records.run),
        }
    }

    /// What is known about the model.
    pub fn facts(&self) -> &Facts {
        &self.summary.facts
    }

    /// Experts in a layer: as the trace or the model says, else the highest id seen plus one.
    pub fn n_expert(&self) -> u32 {
        self.facts()
            .n_expert
            .unwrap_or_else(|| self.counts.n_expert_seen())
    }

    /// Experts that a token is routed to: as the trace or the model says, else the highest slot seen plus one. Where layers
    /// differ and the trace has no slots, the most of any layer.
    pub fn n_expert_used(&self) -> Option<u32> {
        let facts = self.facts();
        let seen = Some(self.counts.n_slot_seen()).filter(|&n| n > 0);
        facts
            .n_expert_used
            .filter(|&n| n > 0)
            .or(seen)
            .or_else(|| facts.max_expert_used())
    }

    /// Streams the rows in order into `sink`, for the exporter `format`.
    ///
    /// # Errors
    /// [`ExportError::NoOrder`] if the trace has counts alone.
    pub fn rows(&self, format: &'static str, sink: &mut dyn Sink) -> Result<(), ExportError> {
        if !self.summary.is_ordered() {
            return Err(ExportError::NoOrder {
                format,
                from: self.summary.format,
            });
        }
        self.input.read(self.options, sink)?;
        Ok(())
    }
}
