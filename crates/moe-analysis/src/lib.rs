//! Analysis of the routing, file accesses and transfers of mixture-of-experts models, and cache simulation.
//!
//! | module | contents |
//! |---|---|
//! | [`hotness`] | selections of each expert of each layer, with router weights |
//! | [`survey`] | order, sequences and domains of the routed tokens |
//! | [`stability`] | train/test splits, drift, convergence and confidence intervals of the hot experts |
//! | [`measures`] | measures of plain counts: Gini coefficient, entropy, total variation, … |
//! | [`simulate`] | cache simulation, prefetching, and models of speed |
//! | [`accesses`] | access patterns: volume, seeks, reuse distances, working sets |
//! | [`diff`] | comparison of two recorded runs |
//! | [`overlap`] | overlap of expert transfers with computation |
//! | `sql` (feature `sql`) | SQL queries over Parquet tables |
//!
//! Inputs are runs, tables and streams of rows of [`moe_trace`]. Outputs are plain data. [`Phases`] selects the tokens of a result, and
//! [`ExpertTally`] contains the selections of an expert.
//!
//! The modules share these terms:
//!
//! - A *row* of a layer is one token that the layer routes. A *selection* is one expert that a row selects, so a row has
//!   `n_expert_used` selections.
//! - A *call* is a pass of one layer over a batch of any number of tokens.
//! - *Mass* is the sum of the router weights of selections.
//! - *In-sample* is measured on the data that selected the experts (training split), *out-of-sample* on other data (held-out split).

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod accesses;
pub mod diff;
pub mod hotness;
pub mod measures;
pub mod overlap;
mod phases;
mod quantile;
pub mod simulate;
#[cfg(feature = "sql")]
pub mod sql;
pub mod stability;
mod stack;
pub mod survey;
mod tally;

pub use phases::Phases;
pub use tally::ExpertTally;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
