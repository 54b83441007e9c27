//! Who lives where: files of observed expert counts, plans of a hot-expert cache made from them, and what an update of such a
//! cache would exchange.
//!
//! Everything here is pure: text and numbers in, text and numbers out. No model files, no GPUs, no plots. The rules are those
//! of a public runtime, the hot-cache fork of llama.cpp (`adrianhoehne/llama.cpp`), to the last expert.

#![warn(missing_docs)]

pub mod learn;
pub mod plan;
pub mod update;
