//! Tests of the public interface, in one binary.

mod atomic;
#[cfg(unix)]
mod child;
#[cfg(unix)]
mod inputs;
#[cfg(unix)]
mod signals;
mod transaction;
