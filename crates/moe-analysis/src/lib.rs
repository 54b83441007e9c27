//! Measures over the routing of mixture-of-experts models: runs and tables in, tables out.

#![warn(missing_docs)]

pub mod accesses;
pub mod diff;
pub mod foreign;
pub mod hotness;
pub mod measures;
pub mod stability;
pub mod survey;
