//! Run directories, their records and their tables, as other programs see them.

#![allow(clippy::unwrap_used)]

mod any_bytes;
mod buffers;
mod check;
mod common;
mod correlation;
mod facts;
#[cfg(unix)]
mod full_disk;
mod graph;
mod layout;
mod read_tables;
mod rewritten_tables;
mod run;
mod table_files;
mod table_limits;
mod tables;
mod transfers;
