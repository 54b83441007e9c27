//! The learn file of the hot-cache runtime: how often each layer's experts were chosen.
//!
//! One JSON schema serves the runtime's learn files and its live performance report. [`LearnFile`] writes the form of a learn
//! run in which no cache was loaded; [`parse_observations`] reads any form by the runtime's own rules.

mod file;
mod observations;

pub use file::{ExpertCount, LayerCounts, LearnFile, LearnLayer, Summary};
pub use observations::{Error, ExpertObservation, LayerObservation, is_usable, parse_observations};

/// The schema name that is written, in use since May 2026.
pub const SCHEMA: &str = "llama.cpp.moe_layer_opt_perf.v1";

/// The older schema name that a reader must take too.
pub const OLD_SCHEMA: &str = "llama.cpp.moe_layer_perf.v1";
