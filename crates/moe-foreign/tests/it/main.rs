//! The importers and exporters, on golden files, on what they make of each other's files, and on any bytes.

#![allow(clippy::unwrap_used)]

mod any_bytes;
mod binary;
#[path = "../../../moe-trace/tests/it/common.rs"]
mod common;
mod golden;
mod round_trip;
