//! Tables of a run: `ops`, `accesses` and `routing`, as Parquet.
//!
//! `schemas/parquet.md` describes the columns. [`write_tables`] puts them into a directory, [`add_to_dataset`] into a
//! Hive-partitioned dataset, [`read_routing`] reads routing back, [`routing_files`] in parts side by side.

mod accesses;
mod chunks;
mod dataset;
mod names;
mod ops;
mod pending;
mod read;
mod routing;
mod routing_table;
mod rows;
mod table;
mod write;

pub use crate::parquet_file::{SCHEMA_KEY, TableMetadata};

pub use dataset::dataset_parts;
pub use pending::PendingTables;
pub use read::{
    ChoiceBatch, RoutingBatch, RoutingFile, RoutingReader, read_routing, routing_files,
};
pub use routing_table::RoutingTable;
pub use write::{
    TableOptions, TableSummary, add_to_dataset, dataset_paths, prepare_for_dataset, prepare_tables,
    table_paths, write_tables,
};

/// Names of the tables, of their files and of a dataset's directories.
pub const TABLES: [&str; 3] = ["ops", "accesses", "routing"];

/// Metadata key of the run's id.
pub const RUN_ID_KEY: &str = "moe-analyze.run_id";
/// Metadata key of the model, the manifest's `model` as JSON.
pub const MODEL_KEY: &str = "moe-analyze.model";

/// Metadata key of the format that a foreign trace had.
pub const FORMAT_KEY: &str = "moe-analyze.format";
/// Metadata key of the bytes of one expert of each layer, a JSON object by layer, where a foreign trace or its model told.
pub const EXPERT_BYTES_KEY: &str = "moe-analyze.expert_bytes";

/// Names of the memory sources, by number.
pub const MEMORY_SOURCES: [&str; 2] = ["DISK", "BUFFER"];
