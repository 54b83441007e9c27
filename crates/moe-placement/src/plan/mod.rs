//! Planning a hot expert cache: [`rank`] weights the observations of a learn file into a ranking, and [`Plan::new`] packs
//! the ranking into one to [`MAX_LANES`] lanes (devices) with a budget each.
//!
//! Formulas, rounding and tie-breaking are those of the hot expert cache of
//! [adrianhoehne/llama.cpp](https://github.com/adrianhoehne/llama.cpp), branch `cached-experts-v2`: it builds the same cache
//! from the same learn file.

mod budget;
mod explain;
mod extended;
mod fill;
mod lane;
mod lanes;
mod layers;
mod ranking;
mod sizes;
mod weighting;

pub use budget::{MIB, auto_budget_bytes, mib_to_bytes};
pub use explain::{ExpertRank, Explanation};
pub use lane::{Lane, Selected};
pub use lanes::{Decision, MAX_LANES, Plan, PlanVerdict, Strategy};
pub use layers::{LayerExperts, OffloadedLayers};
pub use ranking::{Entry, rank};
pub use sizes::{ExpertSizes, SizesFault};
pub use weighting::{LayerCurve, Weighting, layer_weights};

/// Reason why a plan cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The number of lanes is not supported.
    #[error(
        "{n} lanes are not supported; a hot cache has 1 to {MAX_LANES} lanes with one budget each"
    )]
    Lanes {
        /// Number of budgets.
        n: usize,
    },
    /// The name of a weighting is unknown.
    #[error(
        "unknown weighting {name:?}; use flat, pressure, smooth (smooth-pressure, capped, capped-pressure, soft-pressure), \
         time (moe-time, decode-time) or balanced (rank, layer-rank)"
    )]
    Weighting {
        /// The unknown name.
        name: String,
    },
    /// The name of a strategy is unknown.
    #[error("unknown strategy {name:?}; use warm, hot-even or even-split")]
    Strategy {
        /// The unknown name.
        name: String,
    },
    /// A table of sizes is invalid.
    #[error(
        "line {line} of the expert sizes: {fault}; the file must be CSV with the header layer,expert,bytes"
    )]
    Sizes {
        /// Line, from 1.
        line: usize,
        /// The fault in the line.
        #[source]
        fault: SizesFault,
    },
}
