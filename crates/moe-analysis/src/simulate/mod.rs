//! Cache simulation: hits, misses and bytes of a cache with a given policy and budget on a trace.
//!
//! [`Collector`] collects the rows of a trace into [`Batches`]. [`simulate()`] replays them with policies and budgets. The
//! rules of batches and look-ups are those of [`moe_placement::cache`].

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

use moe_files::text::counted;
use moe_placement::cache::BuildError;
use moe_trace::{ExpertId, LayerId};

pub use batches::{Batch, Batches, Workload};
pub use collect::Collector;
pub use grid::{PolicyResult, SimulateOptions, policy_inputs, simulate};
pub use lru_curve::LruCurve;
pub use offload::{BatchTime, MAX_BATCH, Offload};
pub use prefetch::{PrefetchOptions, PrefetchOutcome, prefetch};
pub use replay::{Outcome, replay};
pub use sampled_lru::{Estimate, sampled_lru};
pub use speed::{ExpertTime, Machine, Speed};

/// Reason why a trace cannot be simulated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The size of an expert is unknown.
    #[error("the size of expert {expert} of layer {layer} is unknown")]
    NoSize {
        /// The layer.
        layer: LayerId,
        /// The expert.
        expert: ExpertId,
    },
    /// The trace has too many look-ups.
    #[error("the trace has more than {} lookups; split it into parts", u32::MAX - 1)]
    TooLong,
    /// The sample contains too few experts.
    #[error(
        "a sample of {} is too small to estimate the error; at least {min} are needed, so increase the sampling rate",
        counted(*.n, "expert")
    )]
    Sample {
        /// Number of experts in the sample.
        n: usize,
        /// Minimum number of experts.
        min: usize,
    },
    /// A policy cannot be built.
    #[error(transparent)]
    Policy(#[from] BuildError),
}
