//! The learn file of the hot-cache runtime: how often each layer's experts were chosen.
//!
//! One JSON schema serves the runtime's learn files and its live performance report. [`LearnFile`] reads any form by the
//! runtime's own rules and keeps what it does not know; it also makes the form of a learn run in which no cache was loaded.
//! [`LayerObservation`] is what the runtime takes from a file.

mod error;
mod file;
mod merge;
mod observations;

pub use error::Error;
pub use file::{LayerCounts, LearnFile};
pub use observations::{
    ExpertObservation, LayerObservation, LayerSlots, has_schema, is_usable, parse_observations,
};

/// The schema name that is written, in use since May 2026.
pub const SCHEMA: &str = "llama.cpp.moe_layer_opt_perf.v1";

/// The older schema name that a reader must take too.
pub const OLD_SCHEMA: &str = "llama.cpp.moe_layer_perf.v1";
