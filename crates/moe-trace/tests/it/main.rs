//! Tests of run directories, records and tables through the public API.

#![allow(clippy::unwrap_used)]

mod any_bytes;
mod buffers;
mod check;
mod common;
mod correlation;
mod examples;
#[cfg(unix)]
mod full_disk;
mod graph;
mod layout;
mod manifest;
mod model_info;
mod read_tables;
mod replace_run;
mod rewritten_tables;
mod run;
mod table_files;
mod table_limits;
mod tables;
mod transfers;
