//! The 1024-byte record, the run directory, writing and reading it, Parquet tables, and traces of other tools.
//!
//! A recorder writes a run through [`RunWriter`]; everything else opens it with [`Run`] and walks
//! [`Trace::operations`], or turns it into tables with [`tables`].

#![warn(missing_docs)]

mod accesses;
mod blocks;
pub mod bounded;
pub mod buffers;
pub mod check;
pub mod correlation;
mod error;
mod fault;
pub mod foreign;
pub mod graph;
mod lines;
pub mod manifest;
pub mod map_table;
pub mod names;
mod operations;
pub mod ops;
mod parquet_file;
mod parquet_pages;
pub mod passes;
pub mod record;
mod routing;
mod run;
mod run_directory;
pub mod tables;
mod token;
mod trace;
pub mod transfers;
mod writer;

pub use accesses::{Access, FileAccesses};
pub use error::Error;
pub use fault::{LineFault, ManifestFault, RecordFault, SourceFault, TableFault, TransferFault};
pub use manifest::Manifest;
pub use operations::{Expert, Operation, Operations, TokenExperts};
pub use record::{NO_LAYER, NO_TENSOR, SourceLog, TensorAccessLog};
pub use routing::RoutingOperations;
pub use run::{Run, TRACE_FILE};
pub use token::{TokenKey, TokenStarts};
pub use trace::{Trace, is_trace};
pub use writer::{RunOptions, RunWriter};
