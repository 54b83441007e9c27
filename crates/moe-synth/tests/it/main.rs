//! Tests of the public interface, in one binary.

#![allow(clippy::unwrap_used)]

mod gpt_oss_20b;
mod model;
mod properties;
mod relayout;
