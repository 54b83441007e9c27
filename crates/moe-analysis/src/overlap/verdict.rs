//! Verdict on the overlap: whether the transfers are hidden.

use std::fmt::{self, Display, Formatter};

use super::OverlapStats;

/// Fraction of the transfer time from which on transfers count as hidden, and of the memory bandwidth from which on it
/// counts as saturated.
const THRESHOLD: f64 = 0.9;

/// Whether the transfers are hidden, and why not. `hidden` and `hideable` are fractions of the transfer time, `memory` a fraction
/// of the memory bandwidth (0.0 to 1.0).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OverlapVerdict {
    /// There were no transfers.
    NoTransfers,
    /// Transfers are longer than the windows.
    TooLong {
        /// Mean transfer time in ns.
        transfer_ns: f64,
        /// Mean window in ns.
        window_ns: f64,
        /// Upper bound of `hidden`.
        hideable: f64,
        /// Hidden fraction.
        hidden: f64,
    },
    /// Gate and up alone saturate the memory bandwidth.
    NoGain {
        /// Fraction of the memory bandwidth that gate and up use.
        memory: f64,
        /// Hidden fraction.
        hidden: f64,
    },
    /// Gate, up and the concurrent transfers together saturate the memory bandwidth. The time of a layer then depends only
    /// on its bytes. Post-Fetch is faster only if the CPU alone cannot saturate the bandwidth.
    BandwidthSaturated {
        /// Fraction of the memory bandwidth in use.
        memory: f64,
        /// Hidden fraction.
        hidden: f64,
    },
    /// The transfers are hidden.
    Hidden {
        /// Hidden fraction.
        hidden: f64,
    },
    /// Windows are long enough, but transfers are not within them.
    Missed {
        /// Upper bound of `hidden`.
        hideable: f64,
        /// Hidden fraction.
        hidden: f64,
        /// Mean time from the start of the window to the start of the transfer, in ns.
        delay_ns: f64,
    },
}

impl OverlapVerdict {
    pub(super) fn of(stats: &OverlapStats) -> OverlapVerdict {
        let (Some(hidden), Some(hideable)) = (stats.hidden_share(), stats.hideable_share()) else {
            return OverlapVerdict::NoTransfers;
        };
        let alone = stats.memory_share().unwrap_or(0.0);
        let together = stats.memory_share_with_transfers().unwrap_or(0.0);
        if hideable < THRESHOLD {
            OverlapVerdict::TooLong {
                transfer_ns: stats.transfer.mean_ns().unwrap_or(0.0),
                window_ns: stats.window.mean_ns().unwrap_or(0.0),
                hideable,
                hidden,
            }
        } else if alone >= THRESHOLD {
            OverlapVerdict::NoGain {
                memory: alone,
                hidden,
            }
        } else if together >= THRESHOLD {
            OverlapVerdict::BandwidthSaturated {
                memory: together,
                hidden,
            }
        } else if hidden >= THRESHOLD {
            OverlapVerdict::Hidden { hidden }
        } else {
            OverlapVerdict::Missed {
                hideable,
                hidden,
                delay_ns: stats.mean_delay_ns().unwrap_or(0.0),
            }
        }
    }

    /// The verdict as a machine-readable word.
    pub fn name(&self) -> &'static str {
        match self {
            OverlapVerdict::NoTransfers => "no_transfers",
            OverlapVerdict::TooLong { .. } => "too_long",
            OverlapVerdict::NoGain { .. } => "no_gain",
            OverlapVerdict::BandwidthSaturated { .. } => "bandwidth_saturated",
            OverlapVerdict::Hidden { .. } => "hidden",
            OverlapVerdict::Missed { .. } => "missed",
        }
    }
}

impl Display for OverlapVerdict {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let us = |ns: f64| format!("{:.1} µs", ns * 1e-3);
        match *self {
            OverlapVerdict::NoTransfers => {
                f.write_str("no transfers: the CPU computed every down product")
            }
            OverlapVerdict::TooLong {
                transfer_ns,
                window_ns,
                hideable,
                hidden,
            } => write!(
                f,
                "too long: a transfer takes {} but gate and up only {}, so at most {} of the transfer time can be hidden; {} was hidden",
                us(transfer_ns),
                us(window_ns),
                percent(hideable),
                percent(hidden)
            ),
            OverlapVerdict::NoGain { memory, hidden } => write!(
                f,
                "no gain: {} of the transfer time is hidden, but gate and up alone use {} of the memory bandwidth",
                percent(hidden),
                percent(memory)
            ),
            OverlapVerdict::BandwidthSaturated { memory, hidden } => write!(
                f,
                "memory bandwidth saturated: {} of the transfer time is hidden, but gate and up and the transfers use {} of the memory bandwidth; Post-Fetch is faster only if the CPU alone cannot saturate it",
                percent(hidden),
                percent(memory)
            ),
            OverlapVerdict::Hidden { hidden } => {
                write!(
                    f,
                    "hidden: {} of the transfer time is hidden behind gate and up",
                    percent(hidden)
                )
            }
            OverlapVerdict::Missed {
                hideable,
                hidden,
                delay_ns,
            } => write!(
                f,
                "missed: {} of the transfer time is hidden behind gate and up, at most {} can be; transfers start {} {} the start of gate and up",
                percent(hidden),
                percent(hideable),
                us(delay_ns.abs()),
                if delay_ns < 0.0 { "before" } else { "after" }
            ),
        }
    }
}
