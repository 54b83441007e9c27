//! Integration tests of the executor.

#![allow(clippy::unwrap_used)]

mod adapters;
mod allocations;
mod cuda_models;
mod hot_cache;
mod hparams;
mod llama_cpp;
#[cfg(feature = "cuda")]
mod ptx;
mod records;
mod reference;
mod slots;
mod stand_in;
mod tokenizer;
