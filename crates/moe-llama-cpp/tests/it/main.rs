//! Tests that compare the executor with llama.cpp: the same files and tokens, in one process.
//!
//! Both engines run the same model, and the results are compared. `references` checks llama.cpp against the results recorded in
//! `fixtures/reference`.

#![allow(clippy::unwrap_used)]

mod adapters;
mod architectures;
mod caches;
mod compare;
mod engines;
mod headers;
mod kernels;
mod latent;
mod memory;
mod models;
mod records;
mod references;
mod tokenizers;
mod types;
