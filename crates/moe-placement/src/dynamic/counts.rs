//! Counts of a dynamic cache.

use crate::predict::PrefetchCounts;

/// Counts of a dynamic cache since it was created. Arrays are by phase: `[prompt, generate]`. A look-up is one distinct expert of
/// a layer call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Look-ups.
    pub look_ups: [u64; 2],
    /// Look-ups of experts that the policy held.
    pub hits: [u64; 2],
    /// Bytes of the other experts, whether they were prefetched or not.
    pub missed_bytes: [u64; 2],
    /// Experts that the policy evicted.
    pub evictions: u64,
    /// Look-ups without a free slot: these experts were computed from where they are.
    pub without_slot: u64,
    /// Copies that failed.
    pub failed_copies: u64,
    /// Prefetches of generated tokens.
    pub prefetch: PrefetchLoads,
    /// Counts of predictions; `None` without a predictor.
    pub predictions: Option<PrefetchCounts>,
}

/// Misses of generated tokens by the state of their prefetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefetchLoads {
    /// The copy was complete when the layer needed the expert.
    pub timely: u64,
    /// The layer had to wait for the copy, or no slot was free for the prefetch.
    pub late: u64,
    /// The expert was not prefetched.
    pub missed: u64,
    /// Bytes of all misses and prefetches.
    pub moved_bytes: u64,
}
