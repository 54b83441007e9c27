//! What hits are worth: bounds of the tokens per second of one sequence.
//!
//! A generated token's loads are the bytes that it misses over the link, and a latency for each miss. Its work is the bytes
//! of its experts and of the dense part at the memory's bandwidth, and what else takes time. If nothing overlaps, a token
//! takes both; however well loads are hidden, it takes the longer of the two.

use super::{Needs, Outcome};

/// Measured or given numbers of a machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Of the link over which missed experts come: PCIe, an SSD. Where they are computed in place instead, as under the
    /// static policies, of the memory that they are in.
    pub link_bytes_per_s: f64,
    /// Of each missed expert.
    pub link_latency_s: f64,
    /// Of the memory that holds the cache; `None` leaves reading from it out.
    pub memory_bytes_per_s: Option<f64>,
    /// Bytes that a token reads beside its experts: other weights, keys and values.
    pub dense_bytes: u64,
    /// What else a token takes.
    pub other_s: f64,
}

/// Bounds of a speed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// If nothing overlaps.
    pub tokens_s_min: f64,
    /// If loads and work overlap as well as can be.
    pub tokens_s_max: f64,
    /// Sparse memory-bandwidth utilization of MoE-CAP at these speeds, in percent: bytes of the experts that a token needs
    /// and of the dense part, over the time and the memory's bandwidth.
    pub s_mbu_pct: Option<(f64, f64)>,
}

impl Machine {
    /// The speed of generated tokens with a cache; `None` without generated tokens, or if they take no time.
    ///
    /// Averages over tokens: a token that loads more than others makes the upper bound looser, not wrong.
    pub fn speed(&self, needs: &Needs, outcome: &Outcome) -> Option<Speed> {
        let tokens = Some(needs.tokens).filter(|&n| n > 0)? as f64;
        let misses = outcome.look_ups[1].saturating_sub(outcome.hits[1]) as f64;
        let loads = (outcome.read_bytes[1] as f64 / self.link_bytes_per_s
            + misses * self.link_latency_s)
            / tokens;
        let bytes = needs.bytes as f64 / tokens + self.dense_bytes as f64;
        let reading = self.memory_bytes_per_s.map_or(0.0, |memory| bytes / memory);
        let work = reading + self.other_s;
        let (longest, shortest) = (loads + work, loads.max(work));
        if shortest <= 0.0 {
            return None;
        }
        let s_mbu_pct = |memory: f64| {
            let of = |seconds: f64| 100.0 * bytes / seconds / memory;
            (of(longest), of(shortest))
        };
        Some(Speed {
            tokens_s_min: 1.0 / longest,
            tokens_s_max: 1.0 / shortest,
            s_mbu_pct: self.memory_bytes_per_s.map(s_mbu_pct),
        })
    }
}
