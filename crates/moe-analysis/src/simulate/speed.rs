//! What hits are worth: bounds of the tokens per second of one sequence, with a cache and without.
//!
//! A generated token takes time in several parts of the machine: the SSD and the link that carry missed experts, the CPU
//! that computes those which stay where they are, the device that computes the others and everything else. If nothing
//! overlaps, a token takes the sum of these times; however well they overlap, it takes the longest.

use moe_placement::cache::PolicyName;

use super::{Needs, Row};

/// Measured or given numbers of a machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Bandwidth of the link over which missed experts are copied: PCIe, or an SSD. Where they are computed in place instead,
    /// as under the static policies, and [`cpu`](Self::cpu) is unknown: bandwidth of the memory that they are in.
    pub link_bytes_per_s: f64,
    /// Of each missed expert.
    pub link_latency_s: f64,
    /// Of an SSD that missed experts come from before they pass the link; `None`: they are in memory.
    pub ssd_bytes_per_s: Option<f64>,
    /// Of the memory that holds the cache; `None` leaves reading from it out.
    pub memory_bytes_per_s: Option<f64>,
    /// Time of an expert for a token on the device that has the cache.
    pub device: Option<ExpertTime>,
    /// Time of an expert for a token on the CPU, from memory of its own.
    pub cpu: Option<ExpertTime>,
    /// Bytes that a token reads beside its experts: other weights, keys and values.
    pub dense_bytes: u64,
    /// What else a token takes.
    pub other_s: f64,
}

/// How long an expert is computed, reading its weights included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertTime {
    /// For the first token.
    pub first_s: f64,
    /// For each further token of a batch.
    pub next_s: f64,
}

/// Bounds of a speed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// If nothing overlaps.
    pub tokens_s_min: f64,
    /// If everything overlaps as well as can be.
    pub tokens_s_max: f64,
    /// Sparse memory-bandwidth utilization of MoE-CAP at these speeds, in percent: bytes of the experts that a token needs
    /// and of the dense part, over the time and the memory's bandwidth.
    pub s_mbu_pct: Option<(f64, f64)>,
}

impl Speed {
    /// Whether it is nowhere above another one, neither without overlap nor with the best.
    pub fn is_no_better_than(&self, other: &Speed) -> bool {
        self.tokens_s_min <= other.tokens_s_min && self.tokens_s_max <= other.tokens_s_max
    }
}

/// Some of the experts that all tokens need.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct SomeExperts {
    n: f64,
    bytes: f64,
}

impl Machine {
    /// The speed of generated tokens with a cache; `None` without generated tokens, or if they take no time.
    ///
    /// Averages over tokens: a token that loads more than others makes the upper bound looser, not wrong.
    pub fn speed(&self, needs: &Needs, row: &Row) -> Option<Speed> {
        let outcome = &row.outcome;
        let missed = SomeExperts {
            n: outcome.look_ups[1].saturating_sub(outcome.hits[1]) as f64,
            bytes: outcome.read_bytes[1] as f64,
        };
        let none = SomeExperts::default();
        if self.cpu.is_some() && stay_in_place(row.policy) {
            self.bounds(needs, none, missed)
        } else {
            self.bounds(needs, missed, none)
        }
    }

    /// The speed without a cache, the CPU computing all experts; `None` where its time is not told.
    pub fn speed_without(&self, needs: &Needs) -> Option<Speed> {
        self.cpu?;
        let all = SomeExperts {
            n: needs.look_ups as f64,
            bytes: needs.bytes as f64,
        };
        self.bounds(needs, SomeExperts::default(), all)
    }

    /// With the experts that are loaded over the link, and those that the CPU computes; the device computes all others.
    fn bounds(&self, needs: &Needs, loaded: SomeExperts, on_cpu: SomeExperts) -> Option<Speed> {
        let tokens = Some(needs.tokens).filter(|&n| n > 0)? as f64;
        let reading = |bytes: f64| self.memory_bytes_per_s.map_or(0.0, |memory| bytes / memory);
        let experts_s = match self.device {
            Some(device) => (needs.look_ups as f64 - on_cpu.n) * device.first_s,
            None => reading(needs.bytes as f64 - on_cpu.bytes),
        };
        let dense = self.dense_bytes as f64;
        let parts = [
            self.ssd_bytes_per_s.map_or(0.0, |ssd| loaded.bytes / ssd) / tokens,
            (loaded.bytes / self.link_bytes_per_s + loaded.n * self.link_latency_s) / tokens,
            self.cpu.map_or(0.0, |cpu| on_cpu.n * cpu.first_s) / tokens,
            experts_s / tokens + reading(dense) + self.other_s,
        ];
        let longest: f64 = parts.iter().sum();
        let shortest = parts.into_iter().fold(0.0, f64::max);
        if shortest <= 0.0 {
            return None;
        }
        let bytes = needs.bytes as f64 / tokens + dense;
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

/// Whether a policy leaves an expert where it is that its cache has not.
fn stay_in_place(policy: PolicyName) -> bool {
    matches!(
        policy,
        PolicyName::Static
            | PolicyName::StaticOracle
            | PolicyName::StaticLearn
            | PolicyName::HotCache
    )
}
