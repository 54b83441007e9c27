//! llama.cpp as the oracle of the executor: the same files, the same tokens, in one process.
//!
//! Nothing here is recorded beforehand: models are made, both engines run them, and the results are compared.

#![allow(clippy::unwrap_used)]

mod architectures;
mod compare;
mod engines;
mod headers;
mod kernels;
mod models;
mod records;
mod tokenizers;
mod types;
