//! The Parquet tables of a run: `ops`, `accesses` and `routing`.
//!
//! `schemas/parquet.md` describes the columns. [`write_tables`] writes a directory of tables, [`add_to_dataset`] adds them to a
//! Hive-partitioned dataset. [`read_routing`] reads `routing`; [`routing_files`] is for reading parts of it in parallel.

mod accesses;
mod chunks;
mod dataset;
mod names;
mod ops;
mod pending;
mod read;
mod routing;
mod routing_writer;
mod rows;
mod table;
mod write;

pub use crate::parquet_file::{SCHEMA_KEY, TableMetadata};

pub use dataset::dataset_parts;
pub use pending::PendingTables;
pub use read::{
    CountingBatch, RoutingBatch, RoutingFile, RoutingReader, read_routing, routing_files,
};
pub use routing_writer::RoutingTable;
pub use write::{
    TableOptions, TableSummary, add_to_dataset, dataset_paths, prepare_for_dataset, prepare_tables,
    table_paths, write_tables,
};

/// Names of the tables, their files, and the directories of a dataset.
pub const TABLES: [&str; 3] = ["ops", "accesses", "routing"];

/// Metadata key of the run id.
pub const RUN_ID_KEY: &str = "moe-analyze.run_id";
/// Metadata key of the model: `model` of the manifest, as JSON.
pub const MODEL_KEY: &str = "moe-analyze.model";

/// Metadata key of the original format of a foreign trace.
pub const FORMAT_KEY: &str = "moe-analyze.format";
/// Metadata key of the expert size in bytes: a JSON object by layer. Missing if neither foreign trace nor model contain it.
pub const EXPERT_BYTES_KEY: &str = "moe-analyze.expert_bytes";

/// Names of the memory sources, indexed by number.
pub const MEMORY_SOURCES: [&str; 2] = ["DISK", "BUFFER"];
