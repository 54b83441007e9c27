//! Learn files of the hot expert cache of [adrianhoehne/llama.cpp](https://github.com/adrianhoehne/llama.cpp) (*the fork*):
//! how often each expert of each layer was selected.
//!
//! The fork writes its learn files and its live performance reports with the same JSON schema. [`LearnFile`] reads both
//! with the rules of the fork and preserves unknown keys. It also writes the learn file of a run without a cache.
//! [`LayerObservation`] contains what the fork uses of a file.
//!
//! The fork computes the cached experts of a layer on the GPU, in the *hot lane*, and the others on the CPU, in the *cold
//! lane*. Then it joins both results. An *expert slot* is one selected expert of one token: a pass of n tokens has
//! n × `n_expert_used` slots in each layer. A *call* is one pass of a layer.

mod error;
mod file;
mod merge;
mod observations;

pub use error::Error;
pub use file::{LayerCounts, LearnFile, Totals};
pub use observations::{
    ExpertObservation, LayerObservation, LayerSlots, has_schema, is_usable, parse_observations,
};

/// Schema name of written files, in use since May 2026.
pub const SCHEMA: &str = "llama.cpp.moe_layer_opt_perf.v1";

/// Older schema name, also accepted.
pub const OLD_SCHEMA: &str = "llama.cpp.moe_layer_perf.v1";
