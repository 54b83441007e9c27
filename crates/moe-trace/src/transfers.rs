//! `transfers.jsonl`: the H2D copies of Post-Fetch, one line for each layer of a pass (`schemas/transfers.schema.json`).
//!
//! All times are nanoseconds on the clock of the trace's records.

use std::path::Path;

use moe_ids::{LayerId, TokenId};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::fault::TransferFault;
use crate::lines;
use crate::phase::Phase;

/// Name of the file in a run directory.
pub const FILE_NAME: &str = "transfers.jsonl";

/// The file, for errors.
const EXPECTED: &str = "the transfers.jsonl of a run: pass that file, or its run directory";

/// Maximum number of bytes of a layer: 256 TiB.
const MAX_LAYER_BYTES: u64 = 1 << 48;

/// A time span on the clock of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Start in nanoseconds.
    pub start_ns: u64,
    /// End in nanoseconds, not before the start.
    pub end_ns: u64,
}

/// A layer of a pass: the down matrices of the selected experts are copied to the GPU while the CPU computes gate and up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// Sequence (request).
    pub sequence_id: u32,
    /// Position of the pass's first token in its sequence.
    pub token_id: TokenId,
    /// Phase; in JSON 0 (prompt) or 1 (generate), as in records.
    pub phase: Phase,
    /// Layer.
    pub layer_id: LayerId,
    /// Tokens of the pass.
    pub n_tokens: u32,
    /// Number of distinct selected experts.
    pub n_experts: u32,
    /// Number of these whose down projection the GPU computed; the CPU computed the others.
    pub n_fetched: u32,
    /// Number of copied bytes.
    pub bytes: u64,
    /// Start of the first copy and end of the last; missing if no copy started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<Span>,
    /// Gate and up on the CPU: the window in which copies can be hidden.
    pub window: Span,
    /// The down projection on the GPU; missing if the GPU computed none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub product: Option<Span>,
}

/// Reads the transfers of a file in order. An incomplete last line is omitted.
///
/// # Errors
/// [`Error::Line`] for a line that is not a transfer or is inconsistent, [`Error::OtherLines`] or [`Error::OtherContent`] for a
/// file of another format, [`Error::Io`].
pub fn read(path: &Path) -> Result<Vec<Transfer>, Error> {
    lines::read(path, EXPECTED, |transfer: &Transfer| Ok(transfer.check()?))
}

/// Like [`read`], but passes the transfers to `visit` one at a time.
///
/// # Errors
/// Those of [`read`], and that of `visit`.
pub fn visit<E: From<Error>>(
    path: &Path,
    visit: impl FnMut(Transfer) -> Result<(), E>,
) -> Result<(), E> {
    lines::visit(
        path,
        EXPECTED,
        |transfer: &Transfer| Ok(transfer.check()?),
        visit,
    )
}

/// A warning if the last line of the file is incomplete, which [`read`] omits.
///
/// # Errors
/// [`Error::Io`].
pub fn truncation(path: &Path) -> Result<Option<String>, Error> {
    lines::truncation(path)
}

impl Span {
    /// Duration in nanoseconds.
    pub fn ns(self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }
}

impl Transfer {
    /// Returns an error if the values are inconsistent.
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
        if bytes > MAX_LAYER_BYTES {
            return Err(TransferFault::Bytes {
                bytes,
                limit: MAX_LAYER_BYTES,
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
