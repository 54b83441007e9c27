//! What becomes of the transfers of a layer, as observers and records see it.

use std::fmt::{self, Display, Formatter};
use std::time::Instant;

/// What is known of the down matrix of one chosen expert. It goes from the first to the last within a layer, and is forgotten
/// after the layer's product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The host computes it.
    CpuOnly,
    /// It travels, or is about to.
    CopyInFlight,
    /// It is there.
    GpuReady,
}

/// What has become of the down matrix of one chosen expert; displayed in words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// Layer.
    pub layer: usize,
    /// Expert.
    pub expert: i32,
    /// What it has come to.
    pub state: State,
    /// Why the host computes it, if it does.
    pub reason: Option<Reason>,
}

/// Why the host computes a down matrix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// A layer has no more transfers ([`Settings::max_transfers`](super::Settings::max_transfers)).
    Beyond,
    /// The scratchpad has no room for it.
    NoRoom,
    /// Its transfer could not be started.
    NotStarted,
    /// Its transfer failed on the way.
    Failed,
    /// It had not arrived when it was needed.
    Late,
}

impl Display for Transfer {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        let what = match (self.state, self.reason) {
            (State::CopyInFlight, _) => "is to travel",
            (State::GpuReady, _) => "is there",
            (State::CpuOnly, Some(Reason::Beyond)) => {
                "is beyond the transfers of a layer: left to the processor"
            }
            (State::CpuOnly, Some(Reason::NoRoom)) => {
                "has no room in the scratchpad: left to the processor"
            }
            (State::CpuOnly, Some(Reason::NotStarted)) => "did not begin to travel",
            (State::CpuOnly, Some(Reason::Failed)) => "failed on the way",
            (State::CpuOnly, Some(Reason::Late)) => "is late",
            (State::CpuOnly, None) => "is left to the processor",
        };
        write!(f, "layer {} expert {} {what}", self.layer, self.expert)
    }
}

/// Called when a transfer is about to begin, when it has arrived, and when the host takes over.
pub type Observer = Box<dyn FnMut(Transfer)>;

/// What one layer of one pass did.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Layer.
    pub layer: usize,
    /// Rows.
    pub n_tokens: usize,
    /// Distinct experts chosen.
    pub n_experts: usize,
    /// Of them, those whose down matrix the GPU computed.
    pub n_fetched: usize,
    /// Bytes that travelled.
    pub bytes: u64,
    /// Begin and end of the transfers.
    pub transfer: Option<(Instant, Instant)>,
    /// Begin and end of gate and up on the host.
    pub window: (Instant, Instant),
    /// Begin and end of the product on the GPU.
    pub product: Option<(Instant, Instant)>,
}
