//! Stability of hotness: whether the hot experts of one part of a trace are hot in another part.

mod bootstrap;
mod convergence;
mod curve;
mod drift;
mod split;
mod verdict;

pub use bootstrap::{Interval, bootstrap};
pub use convergence::{Convergence, convergence};
pub use curve::{Curve, curves};
pub use drift::{Drift, N_SPANS, drift};
pub use split::{Coverage, Split, split_by_group, split_by_time};
pub use verdict::{Assessment, MIN_SELECTIONS_PER_EXPERT, Stability, assess};

/// Percentage of a layer's experts that form its hot set.
pub const HOT_PERCENT: usize = 25;

#[cfg(test)]
mod tests;
