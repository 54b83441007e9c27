//! Whether hotness will hold: what was learned on a part of a trace, tested on another.

mod bootstrap;
mod curve;
mod drift;
mod settle;
mod split;
mod trust;

pub use bootstrap::{Interval, bootstrap};
pub use curve::{Curve, curves};
pub use drift::{Drift, N_SPANS, drift};
pub use settle::{Settling, settling};
pub use split::{Coverage, Split, split_by_group, split_by_time};
pub use trust::{Stability, Trust, trust};

/// The share of the experts of a layer that stands for "the hot ones" where one figure is told.
pub const HOT_PERCENT: usize = 25;

#[cfg(test)]
mod tests;
