//! Speed model: bounds of the tokens per second of one sequence, with and without a cache.
//!
//! A generated token uses several resources: the SSD and the interconnect, which transfer missing experts; the CPU, which
//! computes experts that stay in CPU memory; and the device, which computes everything else. Without overlap a token takes
//! the sum of these times, with perfect overlap the maximum.

use moe_placement::cache::PolicyName;

use super::{PolicyResult, Workload};

/// Properties of a machine, measured or assumed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Bandwidth in bytes/s over which missing experts are copied: of PCIe, or of an SSD. If a policy leaves missing experts
    /// in place (static policies, hot cache) and [`cpu`](Self::cpu) is `None`: bandwidth of the memory that contains them.
    pub link_bytes_per_s: f64,
    /// Latency per missing expert, in s.
    pub link_latency_s: f64,
    /// Bandwidth of the SSD in bytes/s that missing experts are read from before they are copied; `None` if they are in
    /// memory.
    pub ssd_bytes_per_s: Option<f64>,
    /// Bandwidth in bytes/s of the memory that contains the cache; `None` ignores the time of its reads.
    pub memory_bytes_per_s: Option<f64>,
    /// Time per expert and token on the device with the cache.
    pub device: Option<ExpertTime>,
    /// Time per expert and token on the CPU, with the expert in CPU memory.
    pub cpu: Option<ExpertTime>,
    /// Bytes per token in addition to the experts: dense weights, keys and values.
    pub dense_bytes: u64,
    /// Additional time per token, in s.
    pub other_s: f64,
}

/// Computation time of an expert, including the reads of its weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertTime {
    /// Time of the first token of a batch, in s.
    pub first_s: f64,
    /// Time of each further token of a batch, in s.
    pub next_s: f64,
}

/// Bounds of the speed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Tokens/s without overlap.
    pub tokens_s_min: f64,
    /// Tokens/s with perfect overlap.
    pub tokens_s_max: f64,
    /// Sparse memory bandwidth utilization (S-MBU of MoE-CAP, <https://arxiv.org/abs/2412.07067>) at these speeds, in
    /// percent: bytes of a token's experts and of the dense part, over time and memory bandwidth. `None` if the bandwidth is
    /// unknown.
    pub s_mbu_pct: Option<(f64, f64)>,
}

impl Speed {
    /// Whether neither bound exceeds the same bound of `other`.
    pub fn is_no_better_than(&self, other: &Speed) -> bool {
        self.tokens_s_min <= other.tokens_s_min && self.tokens_s_max <= other.tokens_s_max
    }
}

/// A subset of the experts of all generated tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct SomeExperts {
    n: f64,
    bytes: f64,
}

impl Machine {
    /// Speed of generated tokens with a cache. `None` without generated tokens, or if a token takes no time.
    ///
    /// The bounds use averages over tokens. If tokens differ, the upper bound is less tight but still valid.
    pub fn speed(&self, workload: &Workload, result: &PolicyResult) -> Option<Speed> {
        let outcome = &result.outcome;
        let missed = SomeExperts {
            n: outcome.look_ups[1].saturating_sub(outcome.hits[1]) as f64,
            bytes: outcome.read_bytes[1] as f64,
        };
        let none = SomeExperts::default();
        if self.cpu.is_some() && stay_in_place(result.policy) {
            self.bounds(workload, none, missed)
        } else {
            self.bounds(workload, missed, none)
        }
    }

    /// Speed without a cache, where the CPU computes all experts. `None` if the CPU time is unknown.
    pub fn speed_without_cache(&self, workload: &Workload) -> Option<Speed> {
        self.cpu?;
        let all = SomeExperts {
            n: workload.look_ups as f64,
            bytes: workload.bytes as f64,
        };
        self.bounds(workload, SomeExperts::default(), all)
    }

    /// Bounds for the experts `loaded` over the interconnect and the experts computed `on_cpu`. The device computes all
    /// others.
    fn bounds(
        &self,
        workload: &Workload,
        loaded: SomeExperts,
        on_cpu: SomeExperts,
    ) -> Option<Speed> {
        let tokens = Some(workload.tokens).filter(|&n| n > 0)? as f64;
        let reading = |bytes: f64| self.memory_bytes_per_s.map_or(0.0, |memory| bytes / memory);
        let experts_s = match self.device {
            Some(device) => (workload.look_ups as f64 - on_cpu.n) * device.first_s,
            None => reading(workload.bytes as f64 - on_cpu.bytes),
        };
        let dense = self.dense_bytes as f64;
        let parts = [
            self.ssd_bytes_per_s.map_or(0.0, |ssd| loaded.bytes / ssd) / tokens,
            (loaded.bytes / self.link_bytes_per_s + loaded.n * self.link_latency_s) / tokens,
            self.cpu.map_or(0.0, |cpu| on_cpu.n * cpu.first_s) / tokens,
            experts_s / tokens + reading(dense) + self.other_s,
        ];
        let sum: f64 = parts.iter().sum();
        let max = parts.into_iter().fold(0.0, f64::max);
        if max <= 0.0 {
            return None;
        }
        let bytes = workload.bytes as f64 / tokens + dense;
        let s_mbu_pct = |memory: f64| {
            let of = |seconds: f64| 100.0 * bytes / seconds / memory;
            (of(sum), of(max))
        };
        Some(Speed {
            tokens_s_min: 1.0 / sum,
            tokens_s_max: 1.0 / max,
            s_mbu_pct: self.memory_bytes_per_s.map(s_mbu_pct),
        })
    }
}

/// Whether a policy leaves missing experts in place instead of loading them.
fn stay_in_place(policy: PolicyName) -> bool {
    matches!(
        policy,
        PolicyName::Static
            | PolicyName::StaticOracle
            | PolicyName::StaticLearn
            | PolicyName::HotCache
    )
}
