//! Tests of the public interface, in one binary.

#![allow(clippy::unwrap_used)]

mod evictions;
mod learn;
mod merge;
mod perf;
mod plan;
mod policies;
mod properties;
mod update;
