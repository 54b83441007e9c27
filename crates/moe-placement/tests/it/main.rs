//! Tests of the public interface, in one binary.

mod evictions;
mod learn;
mod merge;
mod plan;
mod properties;
mod update;
