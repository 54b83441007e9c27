//! An instrumented executor of mixture-of-experts models in GGUF files.
//!
//! ```text
//! Model (GGUF) ──► Session: tokens in, logits out ──► Recorder: one record an operation
//!                    arch/* (data) ─► attention, moe ─► ops/* (what a trace names) ─► cpu/* (how it is computed)
//! ```
#![warn(missing_docs)]

pub mod activation;
pub mod arch;
pub mod attention;
mod buffers;
mod capture;
pub mod cpu;
pub mod cuda;
mod error;
pub mod ffn;
pub mod generate;
pub mod hparams;
pub mod kv_cache;
pub mod mirrored;
pub mod model;
pub mod moe;
pub mod ops;
pub mod placement;
pub mod recorder;
pub mod replay;
pub mod sampler;
pub mod session;
pub mod tokenizer;
pub mod weights;

pub use error::{Error, Result, Warning};
pub use model::Model;
pub use session::Session;
