//! [`Export`] and the traits of exporters: traces in the formats of other tools.

use std::io::{self, Write};

use moe_trace::{LayerId, ModelInfo, Run, Sink, TokenId};

use crate::counts::Counts;
use crate::error::ForeignError;
use crate::input::Input;
use crate::output::Summary;
use crate::{ImportOptions, Records};

/// Writes one format to one file.
pub trait Exporter: Sync {
    /// Short name of the format: the same as that of its importer, if there is one.
    fn name(&self) -> &'static str;

    /// Description of the format in one line: what it contains and which tool reads it.
    fn description(&self) -> &'static str;

    /// Writes `export` to `out`; returns notes about what the format cannot represent.
    ///
    /// # Errors
    /// [`ExportError`]; the caller discards what was written.
    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError>;
}

/// Writes one format to several files in one directory.
pub trait FilesExporter: Sync {
    /// See [`Exporter::name`].
    fn name(&self) -> &'static str;

    /// See [`Exporter::description`].
    fn description(&self) -> &'static str;

    /// Whether [`FilesExporter::export`] may create a file with this name.
    fn is_file_name(&self, name: &str) -> bool;

    /// The text at the start of every file that [`FilesExporter::export`] writes.
    fn head(&self) -> &'static str;

    /// Writes `export` to several files, one after the other. `create` creates a file, given its name. Returns notes about what the
    /// format cannot represent.
    ///
    /// # Errors
    /// Those of [`Exporter::export`].
    fn export(
        &self,
        export: &Export<'_>,
        create: &mut dyn FnMut(&str) -> io::Result<Box<dyn Write>>,
    ) -> Result<Vec<String>, ExportError>;
}

/// Why a trace cannot be written in a format.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The trace contains only counts, but the format contains routing.
    #[error(
        "{format} files contain routing per token, but the input ({from}) contains only counts; convert it to a format of counts"
    )]
    NoOrder {
        /// The format to write.
        format: &'static str,
        /// The format of the input.
        from: &'static str,
    },
    /// The format needs data that the trace does not contain.
    #[error("{format} needs {what}, which the trace does not contain; {hint}")]
    Missing {
        /// The format to write.
        format: &'static str,
        /// The missing data.
        what: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// The format cannot represent the trace.
    #[error("{format}: {source}")]
    Unsupported {
        /// The format to write.
        format: &'static str,
        /// The reason, usually an [`UnsupportedTrace`].
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The trace cannot be read.
    #[error(transparent)]
    Read(#[from] ForeignError),
    /// The file cannot be written.
    #[error("cannot write: {0}")]
    Write(#[from] std::io::Error),
}

impl From<moe_trace::Error> for ExportError {
    fn from(error: moe_trace::Error) -> Self {
        Self::Read(error.into())
    }
}

/// Why a format cannot represent a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnsupportedTrace {
    /// The trace has several sequences, but the format contains one.
    #[error("the trace has several sequences, but the format contains one; {hint}")]
    Sequences {
        /// What to do.
        hint: &'static str,
    },
    /// Some tokens of the trace have a sequence and others have none.
    #[error(
        "some tokens have no sequence, but each row of the format needs one; convert it to jsonl"
    )]
    MixedSequences,
    /// A token occurs twice in a layer.
    #[error(
        "token {token_id} occurs twice in layer {layer_id}: the trace has several sequences without distinguishing them, but the \
         format contains one; convert it to jsonl"
    )]
    RepeatedToken {
        /// Position of the token.
        token_id: TokenId,
        /// The layer.
        layer_id: LayerId,
    },
    /// The array would not fit in memory.
    #[error(
        "an array of {n_tokens} tokens × {n_layer} layers × {top_k} experts is too large; convert the trace to jsonl"
    )]
    TooLarge {
        /// Tokens of the trace.
        n_tokens: usize,
        /// Layers of the array.
        n_layer: usize,
        /// Slots of a token.
        top_k: usize,
    },
    /// The operations of one output file are not consecutive in the run.
    #[error("the operations of token {number} are not consecutive in the run; record one prompt")]
    NotConsecutive {
        /// Number of the token and of its file.
        number: u32,
    },
    /// The input changed between two reads.
    #[error("the trace changed while it was read; convert it again")]
    Changed,
}

/// The input of an exporter: counts and model parameters of a trace, and its rows as a stream that can be read repeatedly.
pub struct Export<'a> {
    input: &'a Input,
    options: &'a ImportOptions,
    /// Records of a foreign trace that contains every operation.
    records: Option<Records>,
    /// Result of the import: parameters of the model, and notes.
    pub summary: Summary,
    /// Counts of the trace, summed from routing or from recorded counts.
    pub counts: Counts,
}

impl<'a> Export<'a> {
    /// Reads `input` once to sum its counts.
    ///
    /// # Errors
    /// The same as [`Input::read`].
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

    /// The run with the records of all operations; `None` if the trace contains only routing or counts.
    pub fn run(&self) -> Option<&Run> {
        match self.input {
            Input::Run(run) => Some(run),
            _ => self.records.as_ref().map(|records| &records.run),
        }
    }

    /// Parameters of the model, as far as they are known.
    pub fn model_info(&self) -> &ModelInfo {
        &self.summary.model_info
    }

    /// Number of experts in a layer: from the trace or the model, otherwise the highest expert id + 1.
    pub fn n_expert(&self) -> u32 {
        self.model_info()
            .n_expert
            .unwrap_or_else(|| self.counts.n_expert_seen())
    }

    /// Number of experts that a token selects: from the trace or the model, otherwise the highest slot + 1. If layers differ and
    /// the trace has no slots, the maximum over the layers. `None` if it is unknown.
    pub fn n_expert_used(&self) -> Option<u32> {
        let model_info = self.model_info();
        let seen = Some(self.counts.n_slot_seen()).filter(|&n| n > 0);
        model_info
            .n_expert_used
            .filter(|&n| n > 0)
            .or(seen)
            .or_else(|| model_info.max_expert_used())
    }

    /// Passes the routing rows to `sink` in order. `format` is the name of the exporter, for errors.
    ///
    /// # Errors
    /// [`ExportError::NoOrder`] if the trace contains only counts.
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
