//! Reader of GGUF files: header, key-values, tensor types, shards, expert slices, offset map and layout checks.
//!
//! [`Gguf::open`] maps the files of a model into memory and parses their headers. [`map::OffsetMap`] lists which bytes of
//! which file belong to which tensor and expert. [`check::check`] reports overlaps, gaps and truncated data.
//!
//! ```no_run
//! let gguf = moe_gguf::Gguf::open("model.gguf")?;
//! for row in &moe_gguf::map::OffsetMap::new(&gguf).rows {
//!     println!("{} {:?} {} {}", row.tensor, row.expert_id, row.file_offset, row.size_bytes);
//! }
//! # Ok::<(), moe_gguf::Error>(())
//! ```
//!
//! Input is not trusted: a header that violates a rule of ggml's reader is an [`Error`] with the file, the byte offset and the
//! rule. No input causes a panic. Opening a model reads its headers only, not tensor data.
//!
//! | module | contents |
//! |---|---|
//! | [`map`] | offset map: the bytes of each tensor and expert |
//! | [`check`](mod@check) | overlaps, gaps and truncated data; files that llama.cpp rejects |
//! | [`verify`](mod@verify) | hashes of tensor data, NaN and infinite values |
//! | [`experts`] | sizes of routed experts in bytes |
//! | [`kv_cache`] | sizes of the KV cache and the recurrent state in bytes |
//! | [`layers`] | order of the layers in the files |
//! | [`names`] | category, layer and expert of a tensor, from its name |
//! | [`format`](mod@format) | constants of the GGUF format, for writers |
//! | [`content`] | recognizes other file formats by their first bytes |
//! | [`tensor_tracer`] | offset map in the formats of the [tensor tracer](https://github.com/ErsjanKeri/BSC) of E. Keri's BSc thesis |

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]
#![warn(missing_docs)]

mod bytes;
pub mod check;
pub mod content;
mod cursor;
mod error;
pub mod experts;
pub mod format;
mod gguf;
mod header;
pub mod kv_cache;
pub mod layers;
pub mod map;
mod metadata;
pub mod names;
mod non_finite;
mod per_layer;
mod shards;
pub mod tensor_tracer;
mod types;
mod value;
pub mod verify;

pub use error::{Error, Fault, ShardFault};
pub use gguf::{Gguf, GgufFile, MAX_EXPERT_ROWS, Tensor};
pub use metadata::Metadata;
pub use moe_ids::{ExpertId, LayerId};
pub use non_finite::NonFinite;
pub use per_layer::PerLayer;
pub use shards::shard_paths;
pub use types::{GgmlType, TypeError};
pub use value::{Array, Value, ValueType};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
