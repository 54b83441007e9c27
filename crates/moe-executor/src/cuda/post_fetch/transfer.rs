//! States and measurements of transfers, for observers and records.

use std::fmt::{self, Display, Formatter};
use std::time::Instant;

/// State of the down matrix of one selected expert. It goes from the first variant to the last within a layer, and ends with the
/// down product of the layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The CPU computes it.
    CpuOnly,
    /// Its copy is in flight or queued.
    CopyInFlight,
    /// It is on the GPU.
    GpuReady,
}

/// A change of state of the down matrix of one selected expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// Layer.
    pub layer: usize,
    /// Expert.
    pub expert: i32,
    /// New state.
    pub state: State,
    /// Why the CPU computes it; `None` in other states.
    pub reason: Option<Reason>,
}

/// Why the CPU computes a down matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// The layer has reached its [limit of transfers](super::Settings::max_transfers).
    OverLimit,
    /// It does not fit into the scratchpad.
    NoRoom,
    /// Its transfer could not be started.
    NotStarted,
    /// Its transfer failed.
    Failed,
    /// Its transfer was not complete in time.
    Missed,
}

impl Display for Transfer {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        let what = match (self.state, self.reason) {
            (State::CopyInFlight, _) => "copy queued",
            (State::GpuReady, _) => "ready on the GPU",
            (State::CpuOnly, Some(Reason::OverLimit)) => {
                "over the limit of transfers per layer, computed on the CPU"
            }
            (State::CpuOnly, Some(Reason::NoRoom)) => {
                "no room in the scratchpad, computed on the CPU"
            }
            (State::CpuOnly, Some(Reason::NotStarted)) => "copy not started, computed on the CPU",
            (State::CpuOnly, Some(Reason::Failed)) => "copy failed, computed on the CPU",
            (State::CpuOnly, Some(Reason::Missed)) => {
                "missed (not ready in time), computed on the CPU"
            }
            (State::CpuOnly, None) => "computed on the CPU",
        };
        write!(f, "layer {} expert {}: {what}", self.layer, self.expert)
    }
}

/// Called at every change of state of a transfer.
pub type Observer = Box<dyn FnMut(Transfer)>;

/// Post-Fetch in one layer of one pass.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Layer.
    pub layer: usize,
    /// Number of tokens.
    pub n_tokens: usize,
    /// Number of distinct selected experts.
    pub n_experts: usize,
    /// Number of them whose down product the GPU computed.
    pub n_fetched: usize,
    /// Transferred bytes.
    pub bytes: u64,
    /// Start of the first transfer and end of the last one.
    pub transfer: Option<(Instant, Instant)>,
    /// Start and end of gate and up on the CPU.
    pub window: (Instant, Instant),
    /// Start and end of the down product on the GPU.
    pub product: Option<(Instant, Instant)>,
}
