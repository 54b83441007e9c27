//! `transfers.jsonl`: what Post-Fetch did in each layer of each pass, a line each (`schemas/transfers.schema.json`).
//!
//! All times are on the clock of the trace's records, nanoseconds.

use std::path::Path;

use moe_ids::{LayerId, TokenId};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::fault::TransferFault;
use crate::lines;
use crate::phase::Phase;

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
    pub token_id: TokenId,
    /// As in a record: 0 prompt, 1 generated.
    pub phase: Phase,
    /// Layer.
    pub layer_id: LayerId,
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
/// [`Error::Line`] for a line that is no transfer or contradicts itself, [`Error::OtherLines`] or [`Error::OtherContent`] for another
/// file, [`Error::Io`].
pub fn read(path: &Path) -> Result<Vec<Transfer>, Error> {
    const EXPECTED: &str = "the transfers.jsonl of a run: give that file, or its run directory";
    lines::read(path, EXPECTED, |transfer: &Transfer| Ok(transfer.check()?))
}

/// A remark about a file whose last line its recorder did not finish, and which [`read`] leaves out.
///
/// # Errors
/// [`Error::Io`].
pub fn truncation(path: &Path) -> Result<Option<String>, Error> {
    lines::truncation(path)
}

impl Span {
    /// How long it takes, nanoseconds.
    pub fn ns(self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }
}

impl Transfer {
    /// Whether the figures can be true together.
    fn check(&self) -> Result<(), TransferFault> {
        let &Transfer {
            n_experts,
            n_fetched,
            bytes,
            ..
        } = self;
        if n_fetched > n_experts {
            return Err(TransferFault::Fetched {
                n_fetched,
                n_experts,
            });
        }
        if n_experts == 0 {
            return Err(TransferFault::NoExperts);
        }
        if bytes > MOST_BYTES {
            return Err(TransferFault::Bytes {
                bytes,
                limit: MOST_BYTES,
            });
        }
        match self.transfer {
            Some(_) if bytes == 0 => return Err(TransferFault::EmptyTransfer),
            None if bytes > 0 => return Err(TransferFault::NoTransfer { bytes }),
            _ => {}
        }
        if n_fetched > 0 && bytes == 0 {
            return Err(TransferFault::FetchedNothing { n_fetched });
        }
        for (span, times) in [
            ("transfer", self.transfer),
            ("window", Some(self.window)),
            ("product", self.product),
        ] {
            if let Some(Span { start_ns, end_ns }) = times
                && end_ns < start_ns
            {
                return Err(TransferFault::Span {
                    span,
                    start_ns,
                    end_ns,
                });
            }
        }
        Ok(())
    }
}
