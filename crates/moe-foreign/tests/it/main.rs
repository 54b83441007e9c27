//! Tests of importers and exporters: golden files, round trips, and arbitrary bytes.

#![allow(clippy::unwrap_used)]

mod any_bytes;
mod binary;
#[path = "../../../moe-trace/tests/it/common.rs"]
mod common;
mod documentation;
mod golden;
mod round_trip;
