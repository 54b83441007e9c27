//! Sums over transfers, and statistics derived from them.

use moe_trace::transfers::{Span, Transfer};

use super::OverlapVerdict;
use crate::quantile::quantile;

/// Number, sum and 95th percentile of the durations of an activity.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DurationStats {
    /// Number of durations.
    pub n: u64,
    /// Sum in nanoseconds.
    pub total_ns: f64,
    /// 95th percentile in nanoseconds; 0 without durations.
    pub p95_ns: f64,
}

impl DurationStats {
    fn new(mut ns: Vec<f64>) -> DurationStats {
        ns.sort_by(f64::total_cmp);
        DurationStats {
            n: ns.len() as u64,
            total_ns: ns.iter().sum(),
            p95_ns: if ns.is_empty() {
                0.0
            } else {
                quantile(&ns, 0.95)
            },
        }
    }

    /// Mean in nanoseconds; `None` without durations.
    pub fn mean_ns(&self) -> Option<f64> {
        ratio(self.total_ns, self.n as f64)
    }
}

/// Transfers of one layer, or of all layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OverlapStats {
    /// Number of evaluations: passes × layers.
    pub evaluations: u64,
    /// Distinct selected experts, summed over the evaluations.
    pub n_experts: u64,
    /// Experts whose down product the GPU computed, summed over the evaluations.
    pub n_fetched: u64,
    /// Bytes transferred.
    pub bytes: u64,
    /// Windows: gate and up on the CPU.
    pub window: DurationStats,
    /// From the start of an evaluation's first transfer to the end of its last one. Evaluations without transfers are not
    /// counted.
    pub transfer: DurationStats,
    /// From the end of the window to the end of the transfer, at least 0. One duration per element of `transfer`.
    pub stall: DurationStats,
    /// Down products on the GPU.
    pub product: DurationStats,
    /// Time of transfers within their windows, in ns.
    pub hidden_ns: f64,
    /// Maximum of `hidden_ns`, reached if each transfer starts with its window: the sum of min(transfer, window).
    pub hideable_ns: f64,
    /// Number of transfers that are not longer than their windows.
    pub fitting: u64,
    /// Sum of the times from the start of the window to the start of the transfer, in ns. Negative if transfers start first.
    pub delay_ns: f64,
    /// Bytes that gate and up read, if the model is known.
    pub gate_up_bytes: Option<f64>,
    /// Measured bandwidth of the memory that contains gate and up, in bytes/s.
    pub memory_bytes_per_s: Option<f64>,
}

impl OverlapStats {
    /// Mean time of a transfer within its window, in ns.
    pub fn mean_overlap_ns(&self) -> Option<f64> {
        ratio(self.hidden_ns, self.transfer.n as f64)
    }

    /// Fraction of the transfer time within the windows, 0.0 to 1.0. `None` without transfers, as in the following methods.
    pub fn hidden_share(&self) -> Option<f64> {
        ratio(self.hidden_ns, self.transfer.total_ns)
    }

    /// Upper bound of [`hidden_share`](Self::hidden_share): min(1, window / transfer), weighted by transfer time.
    pub fn hideable_share(&self) -> Option<f64> {
        ratio(self.hideable_ns, self.transfer.total_ns)
    }

    /// Fraction of the transfers that are not longer than their windows.
    pub fn fitting_share(&self) -> Option<f64> {
        ratio(self.fitting as f64, self.transfer.n as f64)
    }

    /// Fraction of the selected experts whose down product the CPU computed.
    pub fn fallback_rate(&self) -> Option<f64> {
        ratio(
            self.n_experts as f64 - self.n_fetched as f64,
            self.n_experts as f64,
        )
    }

    /// Mean time from the start of the window to the start of the transfer, in ns.
    pub fn mean_delay_ns(&self) -> Option<f64> {
        ratio(self.delay_ns, self.transfer.n as f64)
    }

    /// Bandwidth of the interconnect during transfers, in bytes/s.
    pub fn link_bytes_per_s(&self) -> Option<f64> {
        ratio(self.bytes as f64, self.transfer.total_ns * 1e-9)
    }

    /// Rate at which gate and up read memory, in bytes/s.
    pub fn gate_up_bytes_per_s(&self) -> Option<f64> {
        ratio(self.gate_up_bytes?, self.window.total_ns * 1e-9)
    }

    /// Fraction of the memory bandwidth that gate and up use.
    pub fn memory_share(&self) -> Option<f64> {
        ratio(self.gate_up_bytes_per_s()?, self.memory_bytes_per_s?)
    }

    /// Fraction of the memory bandwidth that gate and up and the transfers within their windows use.
    pub fn memory_share_with_transfers(&self) -> Option<f64> {
        let transferred = self.bytes as f64 * self.hidden_share().unwrap_or(0.0);
        let read = (self.gate_up_bytes? + transferred) / (self.window.total_ns * 1e-9);
        self.memory_share()?;
        ratio(read, self.memory_bytes_per_s?)
    }

    /// The verdict on the overlap.
    pub fn verdict(&self) -> OverlapVerdict {
        OverlapVerdict::of(self)
    }
}

/// `part / whole`; `None` if `whole` is 0.
fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

/// Length of the intersection of two spans in ns.
fn shared_ns(a: Span, b: Span) -> u64 {
    let (start, end) = (a.start_ns.max(b.start_ns), a.end_ns.min(b.end_ns));
    end.saturating_sub(start)
}

/// Accumulates [`OverlapStats`].
#[derive(Default)]
pub(super) struct Collector {
    stats: OverlapStats,
    windows: Vec<f64>,
    transfers: Vec<f64>,
    stalls: Vec<f64>,
    products: Vec<f64>,
}

impl Collector {
    /// Adds an evaluation of a layer, which read `gate_up_bytes`.
    pub(super) fn add(&mut self, run: &Transfer, gate_up_bytes: Option<f64>) {
        let stats = &mut self.stats;
        stats.evaluations += 1;
        stats.n_experts += u64::from(run.n_experts);
        stats.n_fetched += u64::from(run.n_fetched);
        stats.bytes = stats.bytes.saturating_add(run.bytes);
        // The sum is unknown if the bytes of any evaluation are unknown.
        stats.gate_up_bytes = match (stats.evaluations, stats.gate_up_bytes) {
            (1, _) => gate_up_bytes,
            (_, sum) => sum.zip(gate_up_bytes).map(|(sum, bytes)| sum + bytes),
        };
        let window = run.window;
        self.windows.push(window.ns() as f64);
        self.products
            .extend(run.product.map(|span| span.ns() as f64));
        let Some(transfer) = run.transfer else { return };
        stats.hidden_ns += shared_ns(transfer, window) as f64;
        stats.hideable_ns += transfer.ns().min(window.ns()) as f64;
        stats.fitting += u64::from(transfer.ns() <= window.ns());
        // Subtracts integers: timestamps have more digits than an f64.
        stats.delay_ns += (i128::from(transfer.start_ns) - i128::from(window.start_ns)) as f64;
        self.transfers.push(transfer.ns() as f64);
        let stall = transfer.end_ns.saturating_sub(window.end_ns);
        self.stalls.push(stall as f64);
    }

    pub(super) fn finish(self, memory_bytes_per_s: Option<f64>) -> OverlapStats {
        OverlapStats {
            window: DurationStats::new(self.windows),
            transfer: DurationStats::new(self.transfers),
            stall: DurationStats::new(self.stalls),
            product: DurationStats::new(self.products),
            memory_bytes_per_s,
            ..self.stats
        }
    }
}
