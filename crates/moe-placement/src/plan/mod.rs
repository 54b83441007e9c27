//! Which experts a hot-expert cache should hold: observations are weighted into a [ranking](rank), and the ranking is packed
//! into one to three lanes of a budget each.
//!
//! Formulas, roundings and tie-breaks are those of the hot-cache runtime (`adrianhoehne/llama.cpp`, branch
//! `cached-experts-v2`), so that a plan made here is the cache that the runtime builds from the same file.

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
pub use explain::{Explanation, Ranked};
pub use lane::{Lane, Selected};
pub use lanes::{Decision, MAX_LANES, Plan, PlanVerdict, Strategy};
pub use layers::{LayerExperts, WholeLayers};
pub use ranking::{Entry, rank};
pub use sizes::{ExpertSizes, SizesFault};
pub use weighting::{LayerCurve, Weighting, layer_weights};

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number of lanes that the runtime has not.
    #[error("{n} lanes: a hot cache has 1 to {MAX_LANES}; give a budget for each")]
    Lanes {
        /// Lanes asked for.
        n: usize,
    },
    /// A name that is no weighting.
    #[error(
        "{name:?} is no weighting; give flat, pressure, smooth (smooth-pressure, capped, capped-pressure, soft-pressure), \
         time (moe-time, decode-time) or balanced (rank, layer-rank)"
    )]
    Weighting {
        /// The name.
        name: String,
    },
    /// A name that is no strategy.
    #[error("{name:?} is no strategy of several lanes; give warm, hot-even or even-split")]
    Strategy {
        /// The name.
        name: String,
    },
    /// A line of a table of sizes that is not `layer,expert,bytes`.
    #[error(
        "line {line} of the sizes: {fault}; the file must be CSV with the header layer,expert,bytes"
    )]
    Sizes {
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        #[source]
        fault: SizesFault,
    },
}
