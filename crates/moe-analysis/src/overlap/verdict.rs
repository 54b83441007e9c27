//! Whether hiding the transfers worked.

use std::fmt::{self, Display, Formatter};

use super::Figures;

/// Share of the transfers' time from which on they count as hidden, and of the memory's bandwidth from which on it is full.
const NEARLY_ALL: f64 = 0.9;

/// What came of it; shares are of the transfers' time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OverlapVerdict {
    /// There was no transfer.
    Nothing,
    /// Windows are too short.
    TooLong {
        /// Mean, nanoseconds.
        transfer_ns: f64,
        /// Mean, nanoseconds.
        window_ns: f64,
        /// What fits.
        hideable: f64,
        /// What was hidden.
        hidden: f64,
    },
    /// The memory is busy with gate and up alone.
    NoGain {
        /// Part of its bandwidth.
        memory: f64,
        /// What was hidden.
        hidden: f64,
    },
    /// The memory is busy with gate and up and what travels meanwhile. Then all bytes of a layer take as long as the memory
    /// takes for them, whoever reads: something is gained only over a processor that alone does not read so fast.
    MemoryFull {
        /// Part of its bandwidth.
        memory: f64,
        /// What was hidden.
        hidden: f64,
    },
    /// It worked.
    Hidden {
        /// What was hidden.
        hidden: f64,
    },
    /// Windows are long enough, and transfers lie beside them.
    Missed {
        /// What fits.
        hideable: f64,
        /// What was hidden.
        hidden: f64,
        /// Mean time from the begin of the window to that of the transfer, nanoseconds.
        delay_ns: f64,
    },
}

impl OverlapVerdict {
    pub(super) fn of(figures: &Figures) -> OverlapVerdict {
        let (Some(hidden), Some(hideable)) = (figures.hidden_share(), figures.hideable_share())
        else {
            return OverlapVerdict::Nothing;
        };
        let alone = figures.memory_share().unwrap_or(0.0);
        let together = figures.memory_share_with_transfers().unwrap_or(0.0);
        if hideable < NEARLY_ALL {
            OverlapVerdict::TooLong {
                transfer_ns: figures.transfer.mean_ns().unwrap_or(0.0),
                window_ns: figures.window.mean_ns().unwrap_or(0.0),
                hideable,
                hidden,
            }
        } else if alone >= NEARLY_ALL {
            OverlapVerdict::NoGain {
                memory: alone,
                hidden,
            }
        } else if together >= NEARLY_ALL {
            OverlapVerdict::MemoryFull {
                memory: together,
                hidden,
            }
        } else if hidden >= NEARLY_ALL {
            OverlapVerdict::Hidden { hidden }
        } else {
            OverlapVerdict::Missed {
                hideable,
                hidden,
                delay_ns: figures.mean_delay_ns().unwrap_or(0.0),
            }
        }
    }

    /// One word, for tables.
    pub fn word(&self) -> &'static str {
        match self {
            OverlapVerdict::Nothing => "no_transfers",
            OverlapVerdict::TooLong { .. } => "too_long",
            OverlapVerdict::NoGain { .. } => "no_gain",
            OverlapVerdict::MemoryFull { .. } => "bandwidth_saturated",
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
            OverlapVerdict::Nothing => {
                f.write_str("nothing travelled: the host computed every down product")
            }
            OverlapVerdict::TooLong {
                transfer_ns,
                window_ns,
                hideable,
                hidden,
            } => write!(
                f,
                "cannot be hidden: a transfer takes {} and gate and up {}, so that at most {} of the transfers fits under them; {} lay there",
                us(transfer_ns),
                us(window_ns),
                percent(hideable),
                percent(hidden)
            ),
            OverlapVerdict::NoGain { memory, hidden } => write!(
                f,
                "no gain: {} of the transfers lies under gate and up, but these alone use {} of the memory's bandwidth",
                percent(hidden),
                percent(memory)
            ),
            OverlapVerdict::MemoryFull { memory, hidden } => write!(
                f,
                "the memory is full: {} of the transfers lies under gate and up, and together they use {} of its bandwidth; there is a gain only if the processor alone reads less",
                percent(hidden),
                percent(memory)
            ),
            OverlapVerdict::Hidden { hidden } => {
                write!(
                    f,
                    "hidden: {} of the transfers lies under gate and up",
                    percent(hidden)
                )
            }
            OverlapVerdict::Missed {
                hideable,
                hidden,
                delay_ns,
            } => write!(
                f,
                "missed: {} of the transfers lies under gate and up where {} could; they begin {} {} them",
                percent(hidden),
                percent(hideable),
                us(delay_ns.abs()),
                if delay_ns < 0.0 { "before" } else { "after" }
            ),
        }
    }
}
