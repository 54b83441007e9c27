//! llama.cpp in process: runs a GGUF model, calls back for every node of its graph, and records the nodes.
//!
//! ```text
//! Model ──► Context::decode ──► llama.cpp ──► EvalCallback: a Node before and after it is computed
//! Session (Decode) ─┘                            └► Recording ──► RunWriter
//! ```
//!
//! Without the feature `llama-cpp` this crate contains only the names of architectures: compiling llama.cpp takes minutes, and
//! needs cmake and libclang.
#![warn(missing_docs)]

mod architectures;
#[cfg(feature = "llama-cpp")]
mod backend;
#[cfg(feature = "llama-cpp")]
mod context;
#[cfg(feature = "llama-cpp")]
mod error;
#[cfg(feature = "llama-cpp")]
mod graph;
#[cfg(feature = "llama-cpp")]
mod header;
#[cfg(feature = "llama-cpp")]
mod layer;
#[cfg(feature = "llama-cpp")]
mod model;
#[cfg(feature = "llama-cpp")]
mod node;
#[cfg(feature = "llama-cpp")]
mod ops;
#[cfg(feature = "llama-cpp")]
mod recording;
#[cfg(feature = "llama-cpp")]
mod session;

pub use architectures::MOE_ARCHITECTURES;
#[cfg(feature = "llama-cpp")]
pub use backend::{on_abort, version};
#[cfg(feature = "llama-cpp")]
pub use context::{Context, EvalCallback, Params};
#[cfg(feature = "llama-cpp")]
pub use error::{Error, Result};
#[cfg(feature = "llama-cpp")]
pub use model::Model;
#[cfg(feature = "llama-cpp")]
pub use node::Node;
#[cfg(feature = "llama-cpp")]
pub use ops::OpNumbers;
#[cfg(feature = "llama-cpp")]
pub use recording::{Batch, Recording};
#[cfg(feature = "llama-cpp")]
pub use session::{Session, positions_to_allocate};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
