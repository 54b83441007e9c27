//! Simulated caches of experts: what a cache of so many bytes would have hit on a trace, under which policy.
//!
//! [`Collector`] takes the rows of a trace and makes [`Batches`] of them, [`simulate`] replays those under policies and
//! budgets. What a batch is and how it is looked up, [`moe_placement::cache`] tells.

mod batches;
mod collect;
mod grid;
mod lru_curve;
mod offload;
mod prefetch;
mod replay;
mod sampled_lru;
mod speed;
mod windows;

use moe_gguf::text::counted;
use moe_placement::cache::BuildError;
use moe_trace::{ExpertId, LayerId};

pub use batches::{Batch, Batches, Needs};
pub use collect::Collector;
pub use grid::{Row, SimulateOptions, setting, simulate};
pub use lru_curve::LruCurve;
pub use offload::{BatchTime, MAX_BATCH, Offload};
pub use prefetch::{Prefetch, Prefetched, prefetch};
pub use replay::{Outcome, replay};
pub use sampled_lru::{Estimate, sampled_lru};
pub use speed::{ExpertTime, Machine, Speed};

/// Why there is no simulation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nobody knows how large an expert is.
    #[error("the size of expert {expert} of layer {layer} is not known")]
    NoSize {
        /// The layer.
        layer: LayerId,
        /// The expert.
        expert: ExpertId,
    },
    /// More look-ups than can be numbered.
    #[error("the trace has more than {} look-ups; cut it into parts", u32::MAX - 1)]
    TooLong,
    /// Too few experts are followed.
    #[error(
        "a sample of {} is too small to tell its error, {least} are needed; give a higher rate",
        counted(*.n, "expert")
    )]
    Sample {
        /// Experts in it.
        n: usize,
        /// Experts that are needed.
        least: usize,
    },
    /// A policy cannot be made.
    #[error(transparent)]
    Policy(#[from] BuildError),
}
