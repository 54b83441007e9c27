//! Traces of other tools: one file a format and direction, recognised by content.
//!
//! A format holds one of two things. *Routing* in order: which expert a token was routed to, row by row. Or *counts*: how
//! often each expert of each layer was chosen, without order. An importer streams what it reads to a [`Sink`], so memory does
//! not grow with the file; what a format cannot tell is `None`, and what it has lost is told as a note.
//!
//! [`detect`] finds the importer of a path in [`IMPORTERS`], [`import`] runs it. An [`Export`] is a trace, read by an importer or
//! recorded, for an exporter of [`EXPORTERS`] or [`FILES_EXPORTERS`]. [`Input`] reads all of these alike: runs, tables, and traces of
//! other tools.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]
#![warn(missing_docs)]

mod arrays;
mod binary;
mod collected;
mod counts;
mod error;
mod export;
mod exporters;
mod importers;
mod input;
mod json;
mod layers;
mod output;
mod passes;
mod registry;
mod source;

use moe_trace::ops::OpTable;
use moe_trace::{Facts, LayerId, Run, Sink};

pub use binary::npy::{npy_header_f64, npy_header_u64};
pub use collected::Collected;
pub use counts::{Counts, ExpertCount, LayerCounts};
pub use error::{At, ForeignError, Missing, check_model};
pub use export::{Export, ExportError, Exporter, FilesExporter};
pub use importers::responses::ResponseError;
pub use input::Input;
pub use layers::LayerError;
pub use output::{Output, Summary};
pub use registry::{Detected, EXPORTERS, FILES_EXPORTERS, IMPORTERS, detect};
pub use source::{SAMPLE_SIZE, Source};

/// Reads one foreign format.
pub trait Importer: Sync {
    /// Short name, as commands and messages use it: `bigmoeonedge`.
    fn name(&self) -> &'static str;

    /// One line: what the format is and who writes it.
    fn description(&self) -> &'static str;

    /// Whether a file that begins with `sample` is of this format. `sample` holds the first [`SAMPLE_SIZE`] bytes, or the whole
    /// file if it is smaller; it may end inside a line or a record.
    fn is_applicable(&self, sample: &[u8]) -> bool;

    /// What its files hold. Callers that can do more with records or learn files than with rows ask for this, not for the name.
    fn contents(&self) -> Contents {
        Contents::Routing
    }

    /// Whether its files are binary; a text may have a byte order mark in front.
    fn is_binary(&self) -> bool {
        false
    }

    /// Whether a directory whose files are of this format is one trace.
    fn takes_directories(&self) -> bool {
        false
    }

    /// The records of a format that tells every operation; `None` for the others.
    ///
    /// # Errors
    /// As [`Importer::import`].
    fn records(
        &self,
        source: &Source,
        options: &ImportOptions,
    ) -> Result<Option<Records>, ForeignError> {
        let _ = (source, options);
        Ok(None)
    }

    /// Reads `source` to its end and hands over what it says.
    ///
    /// # Errors
    /// [`ForeignError`] with the line, record or byte where the source makes no sense; whatever the sink refuses.
    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError>;
}

/// What the files of a format hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Routing or counts.
    Routing,
    /// Every operation, which [`Importer::records`] turns into records.
    Operations,
    /// Records, which [`Run::open`] reads, too.
    Records,
    /// Counts as a learn file, which [`moe_placement::learn`] reads, too.
    LearnFile,
}

impl Contents {
    /// Whether there are operations, whose numbers a table gives names.
    pub fn has_operations(self) -> bool {
        matches!(self, Self::Operations | Self::Records)
    }
}

/// A trace of whole records: every operation, not the routing alone.
#[derive(Debug)]
pub struct Records {
    /// The records, as a run without manifest and map.
    pub run: Run,
    /// What the format has lost, and what is left out of the routing.
    pub notes: Vec<String>,
}

/// What the user can tell about a trace that its format does not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImportOptions {
    /// Experts that a token is routed to.
    pub top_k: Option<u32>,
    /// Operation numbers of a trace of records; `None` = [`moe_trace::ops::default_table`].
    pub ops: Option<OpTable>,
    /// The model, where the user named its file.
    pub model: Option<Facts>,
}

impl ImportOptions {
    /// Experts that a token is routed to in this layer: as the user says, else as the model says.
    pub fn n_expert_used_in(&self, layer: LayerId) -> Option<u32> {
        let of_model = || self.model.as_ref()?.n_expert_used_in(layer);
        self.top_k.or_else(of_model).filter(|&k| k > 0)
    }

    /// The most experts that a token is routed to in any layer: as the user says, else as the model says.
    pub fn max_expert_used(&self) -> Option<u32> {
        let of_model = || self.model.as_ref()?.max_expert_used();
        self.top_k.or_else(of_model).filter(|&k| k > 0)
    }

    /// Whether all layers route a token to the same number of experts, as far as is known.
    pub fn has_one_top_k(&self) -> bool {
        let model = self.model.as_ref();
        self.top_k.is_some() || model.is_none_or(|model| model.n_expert_used_by_block.is_empty())
    }

    /// Experts in a layer, as the model says.
    pub fn n_expert(&self) -> Option<u32> {
        self.model.as_ref().and_then(|model| model.n_expert)
    }
}

/// Reads `source` into `sink`.
///
/// # Errors
/// As [`Importer::import`]; [`ForeignError::Nothing`] where there was nothing to read.
pub fn import(
    importer: &dyn Importer,
    source: &Source,
    options: &ImportOptions,
    sink: &mut dyn Sink,
) -> Result<Summary, ForeignError> {
    let mut output = Output::new(importer.name(), source, options, sink)?;
    importer.import(source, options, &mut output)?;
    output.finish()
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
