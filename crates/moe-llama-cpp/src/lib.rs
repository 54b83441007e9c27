//! llama.cpp in process: runs a GGUF model, calls back for every node of its graph, and records the nodes.
//!
//! ```text
//! Model ──► Context::decode ──► llama.cpp ──► EvalCallback: a Node before and after it is computed
//! Session (Decode) ─┘                            └► Recording ──► RunWriter
//! ```
//!
//! Without the feature `llama-cpp` this crate is empty: compiling llama.cpp takes minutes, and needs cmake and libclang.
#![cfg(feature = "llama-cpp")]
#![warn(missing_docs)]

mod backend;
mod context;
mod error;
mod graph;
mod header;
mod layer;
mod model;
mod node;
mod ops;
mod recording;
mod session;

pub use backend::{on_abort, version};
pub use context::{Context, EvalCallback, Params};
pub use error::{Error, Result};
pub use model::Model;
pub use node::Node;
pub use ops::OpNumbers;
pub use recording::{Batch, Recording};
pub use session::Session;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
