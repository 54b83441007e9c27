//! `transfers.jsonl`: what Post-Fetch did in each layer of each pass, a line each (`schemas/transfers.schema.json`).
//!
//! All times are on the clock of the trace's records, nanoseconds.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::lines;
use crate::record::PHASE_GENERATE;

/// Name of the file in a run directory.
pub const FILE_NAME: &str = "transfers.jsonl";

/// More bytes than any layer has: 256 TiB.
const MOST_BYTES: u64 = 1 << 48;

/// From when to when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Begin.
    pub start_ns: u64,
    /// End, not before the begin.
    pub end_ns: u64,
}

/// One layer of one pass: the down matrices of the chosen experts travel to the GPU while the host computes gate and up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// Request.
    pub sequence_id: u32,
    /// Position of the pass's first token in its sequence.
    pub token_id: u32,
    /// As in a record: 0 prompt, 1 generated.
    pub phase: u8,
    /// Layer.
    pub layer_id: u16,
    /// Rows of the pass.
    pub n_tokens: u32,
    /// Distinct experts that were chosen.
    pub n_experts: u32,
    /// Of them, those whose down product the GPU computed; the host computed the others.
    pub n_fetched: u32,
    /// Bytes that travelled.
    pub bytes: u64,
    /// Begin of the first transfer and end of the last; absent if none began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<Span>,
    /// Gate and up on the host: the window that transfers can hide in.
    pub window: Span,
    /// The down product on the GPU; absent if it computed none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub product: Option<Span>,
}

/// Reads the transfers of a file, in its order. A last line that its recorder did not finish is left out.
///
/// # Errors
/// [`Error::Line`] for a line that is no transfer or contradicts itself, [`Error::Io`].
pub fn read(path: &Path) -> Result<Vec<Transfer>, Error> {
    lines::read(path, Transfer::check)
}

impl Span {
    /// How long it takes, nanoseconds.
    pub fn ns(self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }
}

impl Transfer {
    /// Says what cannot be.
    fn check(&self) -> Result<(), String> {
        if self.phase > PHASE_GENERATE {
            return Err(format!(
                "phase {}, which is 0 (prompt) or 1 (generated)",
                self.phase
            ));
        }
        if self.n_fetched > self.n_experts {
            return Err(format!(
                "n_fetched {} is more than n_experts {}",
                self.n_fetched, self.n_experts
            ));
        }
        if self.n_experts == 0 {
            return Err("n_experts 0, where a layer's router chooses one at least".to_owned());
        }
        if self.bytes > MOST_BYTES {
            return Err(format!(
                "bytes {}, more than any layer has ({MOST_BYTES})",
                self.bytes
            ));
        }
        if (self.bytes > 0) != self.transfer.is_some() {
            return Err(match self.transfer {
                Some(_) => "bytes 0 beside a transfer, which has some".to_owned(),
                None => format!("bytes {} without a transfer that took them", self.bytes),
            });
        }
        if self.n_fetched > 0 && self.bytes == 0 {
            return Err(format!(
                "n_fetched {} with bytes 0: what the GPU computed has travelled",
                self.n_fetched
            ));
        }
        for (name, span) in [
            ("transfer", self.transfer),
            ("window", Some(self.window)),
            ("product", self.product),
        ] {
            if let Some(Span { start_ns, end_ns }) = span
                && end_ns < start_ns
            {
                return Err(format!(
                    "{name} ends at {end_ns}, before its start at {start_ns}"
                ));
            }
        }
        Ok(())
    }
}
