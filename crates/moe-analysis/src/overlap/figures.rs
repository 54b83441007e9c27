//! Sums over transfers, and what follows from them.

use moe_trace::transfers::{Span, Transfer};

use super::OverlapVerdict;
use crate::quantile::quantile;

/// How long something took, over the times that it happened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    /// How often it happened.
    pub n: u64,
    /// All of it, nanoseconds.
    pub total_ns: f64,
    /// 95 % of the times are below, nanoseconds; 0 if it never happened.
    pub p95_ns: f64,
}

impl Times {
    fn new(mut ns: Vec<f64>) -> Times {
        ns.sort_by(f64::total_cmp);
        Times {
            n: ns.len() as u64,
            total_ns: ns.iter().sum(),
            p95_ns: if ns.is_empty() {
                0.0
            } else {
                quantile(&ns, 0.95)
            },
        }
    }

    /// Nanoseconds.
    pub fn mean_ns(&self) -> Option<f64> {
        ratio(self.total_ns, self.n as f64)
    }
}

/// The transfers of a layer, or of all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// How often a layer ran.
    pub runs: u64,
    /// Experts chosen, each once a run.
    pub n_experts: u64,
    /// Of them, those whose down product the GPU computed.
    pub n_fetched: u64,
    /// Bytes that travelled.
    pub bytes: u64,
    /// Gate and up on the host.
    pub window: Times,
    /// From the begin of a run's first transfer to the end of its last; runs without one are not counted.
    pub transfer: Times,
    /// From the end of the window to the end of the transfer, 0 where that comes first; as often as `transfer`.
    pub stall: Times,
    /// The down product on the GPU.
    pub product: Times,
    /// Time of the transfers that lies within their windows, nanoseconds.
    pub hidden_ns: f64,
    /// The same if each transfer began with its window: the shorter of the two.
    pub hideable_ns: f64,
    /// Transfers that are no longer than their window.
    pub fitting: u64,
    /// Sum of the times from the begin of the window to that of the transfer, nanoseconds; negative where that comes first.
    pub delay_ns: f64,
    /// Bytes that gate and up read, if the model is known.
    pub gate_up_bytes: Option<f64>,
    /// Measured bandwidth of the memory that they read from.
    pub memory_bytes_per_s: Option<f64>,
}

impl Figures {
    /// Mean time of a transfer within its window, nanoseconds.
    pub fn mean_overlap_ns(&self) -> Option<f64> {
        ratio(self.hidden_ns, self.transfer.n as f64)
    }

    /// Part of the transfers' time that lay within the windows.
    pub fn hidden_share(&self) -> Option<f64> {
        ratio(self.hidden_ns, self.transfer.total_ns)
    }

    /// The bound beside it: min(1, window / transfer), weighted by the transfers' times.
    pub fn hideable_share(&self) -> Option<f64> {
        ratio(self.hideable_ns, self.transfer.total_ns)
    }

    /// Part of the transfers that are no longer than their windows.
    pub fn fitting_share(&self) -> Option<f64> {
        ratio(self.fitting as f64, self.transfer.n as f64)
    }

    /// Part of the chosen experts whose down product the host computed.
    pub fn fallback_rate(&self) -> Option<f64> {
        ratio(
            self.n_experts as f64 - self.n_fetched as f64,
            self.n_experts as f64,
        )
    }

    /// Mean time from the begin of the window to that of the transfer, nanoseconds.
    pub fn mean_delay_ns(&self) -> Option<f64> {
        ratio(self.delay_ns, self.transfer.n as f64)
    }

    /// Bytes per second of the link while something travelled.
    pub fn link_bytes_per_s(&self) -> Option<f64> {
        ratio(self.bytes as f64, self.transfer.total_ns * 1e-9)
    }

    /// Bytes per second that gate and up read.
    pub fn gate_up_bytes_per_s(&self) -> Option<f64> {
        ratio(self.gate_up_bytes?, self.window.total_ns * 1e-9)
    }

    /// Part of the memory's bandwidth that gate and up use.
    pub fn memory_share(&self) -> Option<f64> {
        ratio(self.gate_up_bytes_per_s()?, self.memory_bytes_per_s?)
    }

    /// The same with what travels under them: transfers read the same memory.
    pub fn memory_share_with_transfers(&self) -> Option<f64> {
        let travelled = self.bytes as f64 * self.hidden_share().unwrap_or(0.0);
        let read = (self.gate_up_bytes? + travelled) / (self.window.total_ns * 1e-9);
        self.memory_share()?;
        ratio(read, self.memory_bytes_per_s?)
    }

    /// Whether hiding worked, in a word and a line.
    pub fn verdict(&self) -> OverlapVerdict {
        OverlapVerdict::of(self)
    }
}

/// `None` instead of a division by nothing.
fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

/// Nanoseconds that two spans share.
fn shared_ns(a: Span, b: Span) -> u64 {
    let (start, end) = (a.start_ns.max(b.start_ns), a.end_ns.min(b.end_ns));
    end.saturating_sub(start)
}

/// Figures in the making.
#[derive(Default)]
pub(super) struct Collector {
    figures: Figures,
    windows: Vec<f64>,
    transfers: Vec<f64>,
    stalls: Vec<f64>,
    products: Vec<f64>,
}

impl Collector {
    /// Adds a layer of a pass, which read `gate_up_bytes`.
    pub(super) fn add(&mut self, run: &Transfer, gate_up_bytes: Option<f64>) {
        let figures = &mut self.figures;
        figures.runs += 1;
        figures.n_experts += u64::from(run.n_experts);
        figures.n_fetched += u64::from(run.n_fetched);
        figures.bytes = figures.bytes.saturating_add(run.bytes);
        // Of a model that is known in part nothing is told.
        figures.gate_up_bytes = match (figures.runs, figures.gate_up_bytes) {
            (1, _) => gate_up_bytes,
            (_, sum) => sum.zip(gate_up_bytes).map(|(sum, bytes)| sum + bytes),
        };
        let window = run.window;
        self.windows.push(window.ns() as f64);
        self.products
            .extend(run.product.map(|span| span.ns() as f64));
        let Some(transfer) = run.transfer else { return };
        figures.hidden_ns += shared_ns(transfer, window) as f64;
        figures.hideable_ns += transfer.ns().min(window.ns()) as f64;
        figures.fitting += u64::from(transfer.ns() <= window.ns());
        // In integers first: the clock's values have more digits than an f64.
        figures.delay_ns += (i128::from(transfer.start_ns) - i128::from(window.start_ns)) as f64;
        self.transfers.push(transfer.ns() as f64);
        let stall = transfer.end_ns.saturating_sub(window.end_ns);
        self.stalls.push(stall as f64);
    }

    pub(super) fn finish(self, memory_bytes_per_s: Option<f64>) -> Figures {
        Figures {
            window: Times::new(self.windows),
            transfer: Times::new(self.transfers),
            stall: Times::new(self.stalls),
            product: Times::new(self.products),
            memory_bytes_per_s,
            ..self.figures
        }
    }
}
