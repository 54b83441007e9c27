//! Traces of mixture-of-experts models: the 1024-byte record, reading and writing run directories, Parquet tables, and a stream
//! of routing rows ([`Sink`]) for traces of any format.
//!
//! A recorder writes a run with [`RunWriter`]. All other code opens it with [`Run`] and iterates over
//! [`Trace::operations`], or writes tables with [`tables`].
//!
//! ```no_run
//! # fn main() -> Result<(), moe_trace::Error> {
//! let run = moe_trace::Run::open("runs/demo")?;
//! for operation in run.routing() {
//!     for token in operation.tokens() {
//!         let experts = token.experts().map(|expert| expert.expert_id.0);
//!         println!("{:?} {:?} {:?}", token.head().layer(), token.token_id(), experts.collect::<Vec<_>>());
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`record`] | the 1024-byte record of `trace.bin` |
//! | [`ops`] | numbers and names of ggml operations |
//! | [`manifest`] | `manifest.json`: model, machine and settings of a run |
//! | [`passes`] | forward passes of a trace |
//! | `tables` (feature `parquet`) | Parquet tables `ops`, `accesses` and `routing` |
//! | `map_table` (feature `parquet`) | offset map of the model in a run directory |
//! | [`check`] | consistency checks of a run |
//! | [`correlation`], [`names`] | from the sources of an operation to tensors of the model |
//! | [`graph`] | computation graph of a pass |
//! | [`hot_cache`], [`dynamic_cache`] | hot or dynamic expert cache of a run, and their counters |
//! | [`buffers`], [`transfers`] | memory use over time, and H2D copies of Post-Fetch |
//! | [`bounded`], [`json`] | reading untrusted files with limits, and descriptions of JSON errors |
//!
//! The directory `examples` of the crate has programs that read a trace without Arrow and Parquet (`read_trace`), and that write
//! a run directory (`write_run`).
//!
//! # Features
//!
//! `parquet` (default): tables, offset maps, and writing runs, which contain an offset map. Without it, this crate does not
//! depend on Arrow and Parquet. It then reads runs without their map, and `trace.bin` files alone.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]
#![warn(missing_docs)]

mod accesses;
#[cfg(feature = "parquet")]
mod blocks;
pub mod bounded;
pub mod buffers;
pub mod check;
pub mod correlation;
pub mod dynamic_cache;
mod error;
mod expert_ranges;
mod fault;
mod first_of_layer;
pub mod graph;
pub mod hot_cache;
pub mod json;
mod lines;
pub mod manifest;
#[cfg(feature = "parquet")]
pub mod map_table;
mod model_info;
pub mod names;
mod operations;
pub mod ops;
#[cfg(feature = "parquet")]
mod parquet_columns;
#[cfg(feature = "parquet")]
mod parquet_file;
#[cfg(feature = "parquet")]
mod parquet_pages;
#[cfg(feature = "parquet")]
mod parquet_types;
mod pass_table;
pub mod passes;
mod phase;
pub mod record;
mod rest;
#[cfg(feature = "parquet")]
mod rest_writer;
mod run;
#[cfg(feature = "parquet")]
mod run_directory;
mod sink;
#[cfg(feature = "parquet")]
mod table_fault;
#[cfg(feature = "parquet")]
pub mod tables;
mod token;
mod trace;
pub mod transfers;
#[cfg(feature = "parquet")]
mod writer;

pub use accesses::{Access, FileAccesses};
pub use error::Error;
pub use expert_ranges::{ByteRange, ExpertRanges, ExpertTensor};
pub use fault::{LineFault, ManifestFault, RecordFault, SourceFault, TransferFault};
pub use first_of_layer::RoutingOperations;
pub use manifest::Manifest;
pub use model_info::{InvalidModel, ModelError, ModelInfo, ModelMismatch};
pub use moe_ids::{ExpertId, LayerId, MAX_ID, TokenId};
pub use operations::{Expert, Operation, Operations, TokenExperts};
pub use pass_table::{PassTable, TablePass};
pub use phase::{Phase, UnknownPhase};
pub use record::{NO_LAYER, NO_TENSOR, SourceLog, TensorAccessLog};
pub use rest::{Expansion, REST_FILE};
pub use run::{Run, TRACE_FILE};
pub use sink::{CountRow, LayerRow, RoutingRow, Sink, SinkError, is_router_weight};
#[cfg(feature = "parquet")]
pub use table_fault::TableFault;
pub use token::{TokenKey, TokenStarts};
pub use trace::{Trace, is_trace};
#[cfg(feature = "parquet")]
pub use writer::{RunOptions, RunWriter};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
