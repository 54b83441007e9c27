//! The subcommands, one module each.

pub mod accesses;
pub mod bench;
pub mod buffers;
pub mod completions;
pub mod convert;
pub mod diff;
pub mod gguf_map;
pub mod graph;
pub mod hotness;
pub mod info;
pub mod man;
pub mod overlap;
pub mod parquet;
pub mod plan;
pub mod record;
pub mod relayout;
pub mod replay;
pub mod report;
#[cfg(feature = "serve")]
pub mod serve;
pub mod simulate;
#[cfg(feature = "sql")]
pub mod sql;
pub mod stability;
pub mod synth;
