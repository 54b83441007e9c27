//! An instrumented executor of mixture-of-experts models in GGUF files.
//!
//! ```text
//! Model (GGUF) ──► Session: tokens in, logits out ──► Recorder: one record per operation
//!                    arch/* (data) ─► attention, moe ─► ops/* (nodes of the graph) ─► cpu/*, cuda/* (kernels)
//! ```
//!
//! [`Model::load`] reads a model, and [`Session`] evaluates tokens with it; it implements the traits of [`moe_engine`].
//! [`replay`] runs only the MoE layers, with the routing decisions of a trace. [`placement`] and [`devices`] distribute tensors over
//! the CPU and GPUs.
//!
//! Without the feature `cuda`, no CUDA code is compiled, and opening a GPU returns an error.
#![warn(missing_docs, clippy::undocumented_unsafe_blocks)]
#![cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "items that only the CUDA code calls")
)]

mod activation;
mod adapter;
mod arch;
mod attention;
mod buffers;
mod capture;
pub mod cpu;
#[cfg_attr(not(feature = "cuda"), path = "cuda/absent.rs")]
pub mod cuda;
mod device_id;
pub mod devices;
mod error;
mod ffn;
pub mod hot_cache;
pub mod hparams;
mod kv_cache;
pub mod memory;
pub mod mirrored;
pub mod model;
mod moe;
mod norm;
mod ops;
pub mod placement;
pub mod recorder;
mod recurrent;
pub mod replay;
pub mod session;
pub mod tokenizer;
mod weights;

pub use adapter::{Adapter, AdapterFault};
pub use arch::names as architectures;
pub use device_id::{DeviceId, NotADevice};
pub use devices::Devices;
pub use error::{Error, Result, Warning};
pub use kv_cache::{CacheParams, CacheType, UnknownCacheType};
pub use model::Model;
pub use session::Session;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
