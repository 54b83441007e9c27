//! Tests of the public interface, in one binary.

#![allow(clippy::unwrap_used)]

mod atomic;
#[cfg(unix)]
mod child;
#[cfg(unix)]
mod inputs;
#[cfg(unix)]
mod signals;
mod transaction;
