//! Traces of other tools: one trait, one file a format, recognised by content.
//!
//! A format holds one of two things. *Routing* in order: which expert a token was routed to, row by row. Or *counts*: how
//! often each expert of each layer was chosen, without order. An importer streams what it reads to a [`Sink`], so memory does
//! not grow with the file; what a format does not contain is `None`, and what it has lost is a note.
//!
//! [`detect`] finds the importer of a path, [`import`] runs it. Importers of other crates join by being in the slice that both
//! are given.

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
mod model;
mod output;
mod passes;
mod rows;
mod source;
mod table;

use std::path::Path;

use moe_gguf::content::Content;
use moe_gguf::text::without_byte_order_mark;
use xxhash_rust::xxh3::Xxh3;

use crate::ops::OpTable;
use crate::run::Run;

pub(crate) use importers::thesis::passes::PassTable;

pub use binary::npy::{npy_header_f64, npy_header_u64};
pub use collected::Collected;
pub use counts::{Counts, LayerCounts, Tally};
pub use error::{At, ForeignError, Missing};
pub use export::{Export, ExportError, Exporter, FilesExporter};
pub use exporters::{EXPORTERS, FILES_EXPORTERS};
pub use importers::{IMPORTERS, ResponseError};
pub use input::Input;
pub use json::{document, line as json_line};
pub use layers::LayerError;
pub use output::{Output, Sink, SinkError, Summary};
pub use passes::Passes;
pub use rows::{Contradiction, CountRow, Facts, ImpossibleModel, LayerRow, Phase, RoutingRow};
pub use source::{Lines, SAMPLE_SIZE, Source, read_whole, sample_lines};
pub use table::RoutingTable;

/// Layer and expert ids at or above this are no model's: a trace that holds one is damaged.
pub const MAX_ID: u32 = 4096;

/// Reads one foreign format.
pub trait Importer: Sync {
    /// Short name, as commands and messages use it: `bigmoeonedge`.
    fn name(&self) -> &'static str;

    /// One line: what the format is and who writes it.
    fn description(&self) -> &'static str;

    /// Whether a file that begins with `sample` is of this format. `sample` holds the first [`SAMPLE_SIZE`] bytes, or the whole
    /// file if it is smaller; it may end inside a line or a record.
    fn is_applicable(&self, sample: &[u8]) -> bool;

    /// Whether a directory whose files are of this format is one trace.
    fn takes_directories(&self) -> bool {
        false
    }

    /// The records of a format that contains every operation; `None` for the others.
    ///
    /// # Errors
    /// As [`Importer::import`].
    fn records(&self, source: &Source, options: &Options) -> Result<Option<Records>, ForeignError> {
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
        options: &Options,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError>;
}

/// A trace of whole records: every operation, not the routing alone.
#[derive(Debug)]
pub struct Records {
    /// The records, as a run without manifest and map.
    pub run: Run,
    /// What the format has lost, and what is left out of the routing.
    pub notes: Vec<String>,
}

/// What the user says about a trace because its format does not contain it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Experts that a token is routed to.
    pub top_k: Option<u32>,
    /// Operation numbers of a trace of records; `None` = [`crate::ops::default_table`].
    pub ops: Option<OpTable>,
    /// The model, where the user named its file.
    pub model: Option<Facts>,
}

impl Options {
    /// Experts that a token is routed to: as the user says, else as the model says.
    pub fn n_expert_used(&self) -> Option<u32> {
        self.top_k
            .or_else(|| self.model.as_ref().and_then(|model| model.n_expert_used))
    }

    /// Experts in a layer, as the model says.
    pub fn n_expert(&self) -> Option<u32> {
        self.model.as_ref().and_then(|model| model.n_expert)
    }
}

/// A path and the importer that recognised it.
pub struct Detected {
    /// Reads it.
    pub importer: &'static dyn Importer,
    /// What it reads.
    pub source: Source,
}

impl Detected {
    /// Names the trace in datasets: its format, and a hash of the names, sizes and first bytes of its files.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn run_id(&self) -> Result<String, ForeignError> {
        let mut hash = Xxh3::new();
        for file in self.source.files() {
            let name = file.file_name().unwrap_or_default();
            hash.update(name.as_encoded_bytes());
            hash.update(&source::size(file)?.to_le_bytes());
            hash.update(&source::sample(file)?);
        }
        Ok(format!("{}-{:016x}", self.importer.name(), hash.digest()))
    }
}

/// Finds the importer of a file, or of a directory of files of one format; `None` if no one recognises it.
///
/// # Errors
/// The path cannot be read.
pub fn detect(
    path: &Path,
    importers: &[&'static dyn Importer],
) -> Result<Option<Detected>, ForeignError> {
    if path.is_dir() {
        return detect_directory(path, importers);
    }
    let sample = source::sample(path)?;
    let importer = importers
        .iter()
        .find(|&&importer| recognises(importer, &sample));
    Ok(importer.map(|&importer| Detected {
        importer,
        source: Source::file(path),
    }))
}

/// Whether `importer` reads a file that starts with `sample`; a text may have a byte order mark in front. Of the formats that
/// [`Content`] recognizes, importance matrices (GGUF) and files of `torch.save` (ZIP) are traces.
fn recognises(importer: &dyn Importer, sample: &[u8]) -> bool {
    if !matches!(
        Content::of(sample),
        None | Some(Content::Gguf | Content::Zip)
    ) {
        return false;
    }
    let text = without_byte_order_mark(sample);
    importer.is_applicable(sample) || text.len() < sample.len() && importer.is_applicable(text)
}

/// The first file that is recognised decides; files of other formats are left out.
fn detect_directory(
    path: &Path,
    importers: &[&'static dyn Importer],
) -> Result<Option<Detected>, ForeignError> {
    let mut found: Option<&'static dyn Importer> = None;
    let mut files = Vec::new();
    let mut left_out = 0;
    for file in source::files(path)? {
        let sample = source::sample(&file)?;
        let importer = found.or_else(|| {
            let mut candidates = importers.iter().copied();
            candidates
                .find(|importer| importer.takes_directories() && recognises(*importer, &sample))
        });
        match importer {
            Some(importer) if recognises(importer, &sample) => {
                found = Some(importer);
                files.push(file);
            }
            _ => left_out += 1,
        }
    }
    Ok(found.map(|importer| Detected {
        importer,
        source: Source::directory(path, files, left_out),
    }))
}

/// Reads `source` into `sink`.
///
/// # Errors
/// As [`Importer::import`]; [`ForeignError::Nothing`] where there was nothing to read.
pub fn import(
    importer: &dyn Importer,
    source: &Source,
    options: &Options,
    sink: &mut dyn Sink,
) -> Result<Summary, ForeignError> {
    let mut output = Output::new(importer.name(), source, options, sink)?;
    importer.import(source, options, &mut output)?;
    output.finish()
}
