//! Importers and exporters for the traces of other tools.
//!
//! A format contains one of two things:
//!
//! - *Routing*: the selected experts of each token in each layer, in order.
//! - *Counts*: how many tokens selected each expert of each layer, without order.
//!
//! An importer streams what it reads to a [`Sink`], so its memory does not grow with the file. Values that a format does not
//! record are `None`. Losses are reported as notes ([`Summary::notes`]).
//!
//! [`detect`] recognizes a format by the first [`SAMPLE_SIZE`] bytes of a file, never by its name, and returns the importer from
//! [`IMPORTERS`]. [`import`] runs the importer. [`Export`] is the input of the exporters in [`EXPORTERS`] and
//! [`FILES_EXPORTERS`]. [`Input`] reads run directories, Parquet tables and traces of other tools through one interface.
//!
//! Layer, expert, token, slot, phase and *lane* have the meanings of [`moe_trace::RoutingRow`]: a *slot* is the rank of an expert
//! in the top-k of its token, and a [lane](moe_trace::record::lane) is where the expert was computed. `mass` is a sum of router
//! weights.
//!
//! # Formats
//!
//! | name | format | contents | can be written |
//! |---|---|---|---|
//! | `bigmoeonedge` | route CSV of BigMoeOnEdge | routing | yes |
//! | `coli-usage` | `.coli_usage` of colibri | counts | yes |
//! | `colibri-trace` | `ROUTE_TRACE` of colibri | routing | no |
//! | `ds4-hotlist` | hot list of ds4 | counts | yes |
//! | `eplb` | JSON matrix `[layers, experts]` of EPLB | counts | yes |
//! | `eplb-csv` | CSV matrix `[layers, experts]` for EPLB | counts | yes, but not read |
//! | `expert-tracer` | JSON of the expert usage tracer in llama-prefetch.cpp | counts | no |
//! | `iku1` | `IKU1` file of colibri | counts | no |
//! | `imatrix` | importance matrix of llama.cpp (GGUF) | counts | no |
//! | `jsonl` | JSONL with one line per token and layer | routing | yes |
//! | `lattice` | JSONL of lattice | routing | no |
//! | `layer-expert` | CSV of llama.cpp's `moe-trace` example | routing if the top-k is known, else counts | no |
//! | `learn` | learn file of the hot expert cache in llama.cpp | counts | yes |
//! | `mbolt` | routing log of mbolt | routing | no |
//! | `megatron` | `router_trace_rank*.jsonl` of Megatron-LM | routing | no |
//! | `mesh-llm` | `ranking.csv` of Mesh-LLM | counts | yes |
//! | `moe-balance` | JSONL of moe-balance | routing | no |
//! | `npy` | NumPy array `[tokens, layers, top_k]` or `[layers, experts]` | routing or counts | routing |
//! | `npy-counts` | NumPy array `[layers, experts]` | counts | yes, but not read |
//! | `perfetto` | Perfetto trace | all operations | yes, but not read |
//! | `rtrace` | `RTRACE01` of fitz-tec; needs the top-k | routing | no |
//! | `sglang` | `logical_count` JSON of SGLang and ktransformers | counts | yes |
//! | `sglang-pt` | `.pt` dump of SGLang's expert distribution recorder | routing or counts | no |
//! | `sglang-response` | responses of SGLang with `routed_experts`; needs the top-k | routing | no |
//! | `thesis` | `trace.bin` in TensorAccessLog v4 format | all operations | no |
//! | `thesis-json` | `token-NNNNN.json` of the TensorAccessLog tools | all operations | yes |
//! | `vllm` | responses of vLLM with `routed_experts` | routing | no |
//!
//! The source of each importer (`src/importers/`) describes its format in detail and links its definition. TensorAccessLog is the
//! format of [E. Keri's BSc thesis](https://github.com/ErsjanKeri/BSC).

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
mod outline;
mod output;
mod passes;
mod registry;
mod source;

use moe_trace::ops::OpTable;
use moe_trace::{LayerId, ModelInfo, Run, Sink};

pub use arrays::{CountError, RoutingError};
pub use binary::npy::{npy_header_f64, npy_header_u64};
pub use collected::Collected;
pub use counts::{Counts, ExpertCount, LayerCounts};
pub use error::{ForeignError, Location, Missing, check_layers, check_model};
pub use export::{Export, ExportError, Exporter, FilesExporter, UnsupportedTrace};
pub use importers::responses::ResponseError;
pub use importers::shared::text::LineError;
pub use input::Input;
pub use json::JsonError;
pub use layers::LayerError;
pub use output::{Output, Summary, WeightError};
pub use registry::{Detected, EXPORTERS, FILES_EXPORTERS, IMPORTERS, detect, has_format};
pub use source::{SAMPLE_SIZE, Source};

/// Reads one foreign format.
pub trait Importer: Sync {
    /// Short name of the format in commands and messages: `bigmoeonedge`.
    fn name(&self) -> &'static str;

    /// Description of the format in one line: what it contains and which tool writes it.
    fn description(&self) -> &'static str;

    /// Whether a file that starts with `sample` has this format.
    ///
    /// `sample` is the first [`SAMPLE_SIZE`] bytes, or the complete file if it is smaller. It may end inside a line or a record.
    /// If no importer recognizes a longer JSON document, `sample` is its outline: the document with shortened lists and strings.
    fn is_applicable(&self, sample: &[u8]) -> bool;

    /// What files of this format contain. Callers check this instead of the name if they handle records or learn files in a
    /// special way.
    fn contents(&self) -> Contents {
        Contents::Routing
    }

    /// Whether the format is binary. Files of text formats may start with a UTF-8 byte order mark.
    fn is_binary(&self) -> bool {
        false
    }

    /// Whether a directory of files of this format is one trace.
    fn takes_directories(&self) -> bool {
        false
    }

    /// The records of a format that contains every operation; `None` for other formats.
    ///
    /// # Errors
    /// The same as [`Importer::import`].
    fn records(
        &self,
        source: &Source,
        options: &ImportOptions,
    ) -> Result<Option<Records>, ForeignError> {
        let _ = (source, options);
        Ok(None)
    }

    /// Reads `source` completely and passes its routing or its counts to `output`.
    ///
    /// # Errors
    /// [`ForeignError`] with the line, record or byte of invalid data, or the error of the sink.
    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError>;
}

/// What the files of a format contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Routing or counts.
    Routing,
    /// Every operation. [`Importer::records`] converts them to records.
    Operations,
    /// 1024-byte records, which [`Run::open`] reads too.
    Records,
    /// A learn file (counts), which [`moe_placement::learn`] reads too.
    LearnFile,
}

impl Contents {
    /// Whether the format contains operations, whose numbers or names need a table of operations ([`ImportOptions::ops`]).
    pub fn has_operations(self) -> bool {
        matches!(self, Self::Operations | Self::Records)
    }
}

/// A trace of every operation, as records.
#[derive(Debug)]
pub struct Records {
    /// The records as a run without a manifest and an offset map.
    pub run: Run,
    /// Notes about data that the format does not contain, and about records that the routing of the run skips.
    pub notes: Vec<String>,
}

/// Properties of the model and the trace that the caller specifies, because some formats do not record them. All are unknown by
/// default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImportOptions {
    /// Experts that a token selects in a layer (top-k).
    pub top_k: Option<u32>,
    /// Operation numbers of a trace of records; `None` means [`moe_trace::ops::default_table`].
    pub ops: Option<OpTable>,
    /// Parameters of the model that was traced, for example from its GGUF file.
    pub model: Option<ModelInfo>,
}

impl ImportOptions {
    /// Experts that a token selects in `layer`: `top_k` if it is set, else the number of the model.
    pub fn n_expert_used_in(&self, layer: LayerId) -> Option<u32> {
        let of_model = || self.model.as_ref()?.n_expert_used_in(layer);
        self.top_k.or_else(of_model).filter(|&k| k > 0)
    }

    /// Maximum number of experts that a token selects in any layer: `top_k` if it is set, else the number of the model.
    pub fn max_expert_used(&self) -> Option<u32> {
        let of_model = || self.model.as_ref()?.max_expert_used();
        self.top_k.or_else(of_model).filter(|&k| k > 0)
    }

    /// Whether the same number of experts is selected for a token in all layers, as far as is known.
    pub fn has_uniform_top_k(&self) -> bool {
        let model = self.model.as_ref();
        self.top_k.is_some() || model.is_none_or(|model| model.n_expert_used_by_block.is_empty())
    }

    /// Experts in a layer of the model.
    pub fn n_expert(&self) -> Option<u32> {
        self.model.as_ref().and_then(|model| model.n_expert)
    }
}

/// Reads `source` into `sink` with `importer`.
///
/// # Errors
/// The same as [`Importer::import`]; [`ForeignError::NoRouting`] if the source contains neither routing nor counts.
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
