//! Tests of the program and of rules for all crates, in one binary: a module for each subcommand or topic.

#![allow(clippy::unwrap_used)]

mod accesses;
mod architectures;
mod cache_names;
mod cli;
mod compressed_trace;
mod diff;
#[cfg(all(unix, feature = "plot", feature = "sql"))]
mod docs;
mod dynamic_cache;
mod engines;
mod exports;
#[cfg(unix)]
mod files;
mod foreign_traces;
mod gguf_map;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod gpu_list;
mod gpu_memory;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod gpu_that_fails;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod gpu_times;
mod graph;
mod hot_cache;
mod hotness;
mod info;
mod library_messages;
mod limits;
mod lora;
mod notebooks;
mod options;
mod overlap;
mod perfetto;
mod plan;
mod plots;
mod python_package;
mod record;
mod record_chat;
mod relayout;
mod replay;
mod report;
mod rewritten;
mod schemas;
#[cfg(all(unix, feature = "serve"))]
mod serve;
mod simulate;
#[cfg(feature = "sql")]
mod sql;
mod stability;
mod support;
mod synth;
mod tables;
mod wrong_files;
