//! Writer of GGUF files: synthetic models, and models with their tensors and experts in another order.
//!
//! [`model::Synth`] plans a model of a known architecture with random weights. [`relayout::Layout`] plans a new order of an
//! existing model. Both write with [`write::Writer`], which streams a header and the data of tensors.
//!
//! ```
//! use moe_synth::model::{Spec, Synth, SynthOptions};
//!
//! let mut spec = Spec::like("olmoe-1b-7b").unwrap();
//! spec.n_layer = 1;
//! let synth = Synth::new(&spec, SynthOptions::default())?;
//! assert_eq!(synth.tensors().len(), 12 + 3);
//! # Ok::<(), moe_synth::model::Error>(())
//! ```

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod model;
pub mod relayout;
pub mod write;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
