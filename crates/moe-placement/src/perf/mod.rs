//! Counters of a running hot expert cache, and the report of them.
//!
//! [`Counters`] counts, for each layer, how often each expert was selected, and how many expert slots each lane computed.
//! [`Counters::to_learn_file`] returns them in the schema of learn files, as the fork
//! ([adrianhoehne/llama.cpp](https://github.com/adrianhoehne/llama.cpp)) reports them. Therefore every reader of learn files
//! reads the report: [`rank`](crate::plan::rank) plans the next cache from it, and [`Update`](crate::update::Update) the
//! exchanges after a request.
//!
//! ```
//! use moe_placement::LayerId;
//! use moe_placement::perf::{Counters, LaneIndex, LayerCall, PerfMode};
//!
//! let mut counters = Counters::new(PerfMode::Update, 8, 2);
//! counters.start_pass();
//! // One token selected the experts 3 and 5. Expert 3 is in the first hot lane.
//! counters.add_call(&LayerCall {
//!     layer: LayerId(0),
//!     ids: &[3, 5],
//!     lanes: &[LaneIndex::Hot0, LaneIndex::Cold],
//!     times: None,
//! });
//! assert_eq!(counters.hit_rate(), Some(0.5));
//! let observations = counters.to_learn_file().observations()?;
//! assert_eq!(observations[0].experts[0].hot, 1);
//! # Ok::<(), moe_placement::learn::Error>(())
//! ```
//!
//! # Times
//!
//! [`PerfMode::Full`] adds averages of [`LayerTimes`]. Measured times may stand for several calls ([`Counters::add_times`]). The
//! report contains the keys of the table, and no others: the remaining keys of the fork describe graph nodes and a prompt path
//! that other engines do not have.
//!
//! | key, with the suffix `_per_call_us` | time |
//! |---|---|
//! | `parallel_hot_lane_wall_time` | sum of [`LayerTimes::hot_lanes`] |
//! | `parallel_cold_lane_wall_time` | [`LayerTimes::cold_lane`] |
//! | `parallel_join_wait_time` | [`LayerTimes::join_wait`] |
//! | `total_moe_time` | [`LayerTimes::total`] |
//! | `routing_time` | [`LayerTimes::routing`] |
//! | `worklist_time` | [`LayerTimes::worklist`] |
//! | `merge_time` | [`LayerTimes::merge`] |
//! | `hotN_branch_time`, N from 0 to 2 | one element of [`LayerTimes::hot_lanes`] |
//! | `parallel_region_wall_time` | [`LayerTimes::region`] |
//! | `parallel_overlap_estimate` | lane times minus `region`, at least 0 for each call |
//!
//! It also counts, per layer, launches of lanes (`parallel_hot_launches`, `parallel_cold_launches`), calls in which a lane had
//! no slots (`parallel_hot_skips_zero`, `parallel_cold_skips_zero`) and fallbacks (`parallel_fallbacks`, all with the
//! reason `other`).

mod counters;
mod layer;
mod report;
mod shared;

use std::fmt;
use std::str::FromStr;

pub use counters::{Counters, LayerCall};
pub use layer::LayerTimes;
pub use shared::SharedCounters;

use crate::plan::MAX_LANES;

/// What [`Counters`] count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PerfMode {
    /// Nothing.
    Off,
    /// Selections and slots, which an update of the cache needs.
    #[default]
    Update,
    /// Also times, launches, skipped lanes and fallbacks.
    Full,
}

impl PerfMode {
    /// Name in reports and on the command line of the fork.
    pub fn name(self) -> &'static str {
        match self {
            PerfMode::Off => "off",
            PerfMode::Update => "update",
            PerfMode::Full => "full",
        }
    }
}

impl fmt::Display for PerfMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The name of a mode is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown mode {name:?}; use off (0, false), update or full (1, on, true)")]
pub struct UnknownMode {
    /// The unknown name.
    pub name: String,
}

/// Accepts the spellings of the fork.
impl FromStr for PerfMode {
    type Err = UnknownMode;

    fn from_str(name: &str) -> Result<PerfMode, UnknownMode> {
        match name {
            "off" | "0" | "false" => Ok(PerfMode::Off),
            "update" => Ok(PerfMode::Update),
            "full" | "1" | "on" | "true" => Ok(PerfMode::Full),
            _ => Err(UnknownMode { name: name.into() }),
        }
    }
}

/// The lane that computed an expert slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LaneIndex {
    /// The first hot lane: lane 0 of a [`Plan`](crate::plan::Plan).
    Hot0,
    /// The second hot lane.
    Hot1,
    /// The third hot lane.
    Hot2,
    /// The cold lane: the expert is not in the cache.
    Cold,
}

impl LaneIndex {
    /// All hot lanes, in the order of a plan.
    pub const HOT: [LaneIndex; MAX_LANES] = [LaneIndex::Hot0, LaneIndex::Hot1, LaneIndex::Hot2];

    /// All lanes: the hot lanes, then the cold lane.
    pub const ALL: [LaneIndex; MAX_LANES + 1] = [
        LaneIndex::Hot0,
        LaneIndex::Hot1,
        LaneIndex::Hot2,
        LaneIndex::Cold,
    ];

    /// Name in reports: `hot0`, `hot1`, `hot2` or `cold`.
    pub fn name(self) -> &'static str {
        match self {
            LaneIndex::Hot0 => "hot0",
            LaneIndex::Hot1 => "hot1",
            LaneIndex::Hot2 => "hot2",
            LaneIndex::Cold => "cold",
        }
    }

    /// The hot lane with an index in a plan; `None` if the index is not below [`MAX_LANES`].
    pub fn hot(index: usize) -> Option<LaneIndex> {
        LaneIndex::HOT.get(index).copied()
    }

    /// Index in a plan; `None` for the cold lane.
    pub fn hot_index(self) -> Option<usize> {
        match self {
            LaneIndex::Hot0 => Some(0),
            LaneIndex::Hot1 => Some(1),
            LaneIndex::Hot2 => Some(2),
            LaneIndex::Cold => None,
        }
    }

    /// Whether a hot lane computed the slot.
    pub fn is_hot(self) -> bool {
        self != LaneIndex::Cold
    }
}
