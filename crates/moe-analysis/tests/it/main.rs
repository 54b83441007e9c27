//! Tests of the public interface, in one binary.

#![allow(clippy::unwrap_used)]

mod accesses;
mod caches;
mod diff;
mod hotness;
mod overlap;
mod sampled;
mod speed;
mod synthetic;
