//! Measures over the routing and the transfers of mixture-of-experts models, and simulated caches: runs and tables in, tables out.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod accesses;
pub mod diff;
pub mod hotness;
pub mod measures;
pub mod overlap;
mod quantile;
pub mod simulate;
#[cfg(feature = "sql")]
pub mod sql;
pub mod stability;
mod stack;
pub mod survey;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
