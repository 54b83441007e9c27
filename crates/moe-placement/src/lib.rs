//! Who lives where: files of observed expert counts, and later the plans made from them.
//!
//! Everything here is pure: text and numbers in, text and numbers out. No model files, no GPUs, no plots.

#![warn(missing_docs)]

pub mod learn;
