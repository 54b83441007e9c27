//! Tests of the public interface, in one binary.

#![allow(clippy::unwrap_used)]

mod experts;
mod fixtures;
mod gguf_py;
mod kv_cache;
mod layouts;
mod malformed_header;
mod malformed_tensors;
mod memory;
mod opened;
mod reports;
mod shards;
mod types;
mod verify;
