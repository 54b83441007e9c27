//! Measures over the routing of mixture-of-experts models: tables in, tables out.

#![warn(missing_docs)]

pub mod hotness;
