//! Measures over the routing of mixture-of-experts models, and caches simulated on it: runs and tables in, tables out.

#![warn(missing_docs)]

pub mod accesses;
pub mod diff;
pub mod foreign;
pub mod hotness;
pub mod measures;
pub mod simulate;
pub mod stability;
mod stack;
pub mod survey;
