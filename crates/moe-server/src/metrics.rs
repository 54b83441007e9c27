//! Counts and times of the scheduler since its start.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moe_placement::perf::LaneIndex;

use crate::generation::FinishReason;
use crate::recording::TraceCounts;

/// Upper limits of the buckets of a [`Histogram`] in seconds.
pub const BUCKETS: [f64; 14] = [
    0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
];

/// Distribution of times.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Histogram {
    /// Number of values in each bucket of [`BUCKETS`], then of values above the last limit. Not cumulative.
    pub counts: [u64; BUCKETS.len() + 1],
    /// Sum of all values in seconds.
    pub sum: f64,
}

impl Histogram {
    /// Number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.counts[BUCKETS.partition_point(|limit| *limit < seconds)] += 1;
        self.sum += seconds;
    }
}

/// Number of expert slots of each lane, in the order of [`LaneIndex::ALL`].
pub(crate) type LaneSlots = [u64; LaneIndex::ALL.len()];

/// Names of the outcomes of requests in [`MetricsSnapshot::requests`].
pub const OUTCOMES: [&str; 7] = [
    "end_of_generation",
    "length",
    "context_full",
    "time_limit",
    "cancelled",
    "failed",
    "rejected",
];

/// How an accepted request ended.
#[derive(Clone, Copy)]
pub(crate) enum Outcome {
    Finished(FinishReason),
    Failed,
}

impl Outcome {
    /// One of [`OUTCOMES`].
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Finished(FinishReason::EndOfGeneration) => "end_of_generation",
            Outcome::Finished(FinishReason::Length) => "length",
            Outcome::Finished(FinishReason::ContextFull) => "context_full",
            Outcome::Finished(FinishReason::TimeLimit) => "time_limit",
            Outcome::Finished(FinishReason::Cancelled) => "cancelled",
            Outcome::Failed => "failed",
        }
    }
}

/// State and counts of the scheduler at one time.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct MetricsSnapshot {
    /// Number of requests that can run at the same time.
    pub n_slots: usize,
    /// Number of requests that run now.
    pub n_running: usize,
    /// Number of requests in the queue.
    pub n_queued: usize,
    /// Maximum number of requests in the queue while all slots are busy.
    pub queue_capacity: usize,
    /// Number of passes.
    pub passes: u64,
    /// Number of passes that failed.
    pub failed_passes: u64,
    /// Number of evaluated prompt tokens.
    pub prompt_tokens: u64,
    /// Time of passes over prompts. The time of a pass that also evaluates generated tokens is divided by the numbers of tokens.
    pub prompt_time: Duration,
    /// Number of generated tokens.
    pub generated_tokens: u64,
    /// Time of passes over generated tokens; see `prompt_time`.
    pub generation_time: Duration,
    /// Number of requests by outcome. The keys are [`OUTCOMES`]; outcomes without requests are missing.
    pub requests: BTreeMap<&'static str, u64>,
    /// Times of requests in the queue.
    pub queue_time: Histogram,
    /// Times from the submission of a request to its first token.
    pub first_token_time: Histogram,
    /// Times between two tokens of a request.
    pub token_time: Histogram,
    /// Times from the submission of a request to its end, for all outcomes except `rejected`.
    pub request_time: Histogram,
    /// Number of expert selections of each lane, in the order of [`LaneIndex::ALL`]. Unlike the counters of the expert cache, they do
    /// not restart after an update of the cache. Nothing is added while these counters are off.
    pub selections: [u64; LaneIndex::ALL.len()],
    /// Number of updates that exchanged experts of the expert cache.
    pub cache_updates: u64,
    /// Number of experts that these updates exchanged.
    pub exchanged_experts: u64,
    /// Recorded traces.
    pub traces: TraceCounts,
}

/// The counts, shared by the scheduler and its handles. The numbers of slots and of requests in the queue are those of the queue.
#[derive(Default)]
pub(crate) struct Metrics(Mutex<MetricsSnapshot>);

impl Metrics {
    /// Locks the counts. A thread that panicked leaves valid counts.
    pub fn lock(&self) -> MutexGuard<'_, MetricsSnapshot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request that is not accepted.
    pub fn rejected(&self) {
        *self.lock().requests.entry("rejected").or_default() += 1;
    }

    /// Counts the end of a request, `time` after its submission.
    pub fn ended(&self, outcome: Outcome, time: Duration) {
        let mut counts = self.lock();
        *counts.requests.entry(outcome.name()).or_default() += 1;
        counts.request_time.add(time);
    }

    /// Adds the time that a request waited in the queue.
    pub fn started(&self, queue_time: Duration) {
        self.lock().queue_time.add(queue_time);
    }

    /// Counts a generated token.
    pub fn generated(&self, time: TokenTime) {
        let mut counts = self.lock();
        counts.generated_tokens += 1;
        match time {
            TokenTime::First(since_submission) => counts.first_token_time.add(since_submission),
            TokenTime::Next(since_last) => counts.token_time.add(since_last),
        }
    }

    /// Counts an update of the expert cache. It has no effect if no expert was exchanged.
    pub fn updated_cache(&self, exchanged: usize) {
        let mut counts = self.lock();
        counts.cache_updates += u64::from(exchanged > 0);
        counts.exchanged_experts += exchanged as u64;
    }

    /// Adds the expert selections of a pass: the difference between the counters of the expert cache after and before it. Counters
    /// that restarted in the pass contain its last calls only.
    pub fn selected(&self, before: LaneSlots, after: LaneSlots) {
        let mut counts = self.lock();
        for ((sum, before), after) in counts.selections.iter_mut().zip(before).zip(after) {
            *sum += after.checked_sub(before).unwrap_or(after);
        }
    }

    /// Counts a successful pass over prompt tokens and generated tokens.
    pub fn passed(&self, [n_prompt, n_generated]: [usize; 2], time: Duration) {
        let mut counts = self.lock();
        counts.passes += 1;
        counts.prompt_tokens += n_prompt as u64;
        let share = n_prompt as f64 / (n_prompt + n_generated).max(1) as f64;
        let of_prompt = time.mul_f64(share);
        counts.prompt_time += of_prompt;
        counts.generation_time += time.saturating_sub(of_prompt);
    }
}

/// Time of a generated token.
#[derive(Clone, Copy)]
pub(crate) enum TokenTime {
    /// The first token of a request, since its submission.
    First(Duration),
    /// A later token, since the previous one.
    Next(Duration),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_counts_values_up_to_and_including_the_limit_of_a_bucket() {
        let mut histogram = Histogram::default();
        for ms in [0, 1, 2, 700_000] {
            histogram.add(Duration::from_millis(ms));
        }
        assert_eq!(histogram.counts[..3], [2, 1, 0]);
        assert_eq!(histogram.counts[BUCKETS.len()], 1);
        assert_eq!(histogram.count(), 4);
        assert!((histogram.sum - 700.003).abs() < 1e-9);
    }

    #[test]
    fn selections_continue_after_a_restart_of_the_counters() {
        let metrics = Metrics::default();
        metrics.selected([0; 4], [1, 2, 3, 4]);
        metrics.selected([1, 2, 3, 4], [5, 2, 3, 6]);
        metrics.selected([5, 2, 3, 6], [1, 0, 0, 7]);
        assert_eq!(metrics.lock().selections, [6, 2, 3, 7]);
    }

    #[test]
    fn an_update_without_exchanges_is_not_counted() {
        let metrics = Metrics::default();
        for exchanged in [0, 3, 0, 2] {
            metrics.updated_cache(exchanged);
        }
        let counts = metrics.lock();
        assert_eq!((counts.cache_updates, counts.exchanged_experts), (2, 5));
    }

    #[test]
    fn time_of_a_mixed_pass_is_divided_by_tokens() {
        let metrics = Metrics::default();
        metrics.passed([3, 1], Duration::from_millis(400));
        let counts = metrics.lock();
        assert_eq!(counts.prompt_time, Duration::from_millis(300));
        assert_eq!(counts.generation_time, Duration::from_millis(100));
        assert_eq!((counts.passes, counts.prompt_tokens), (1, 3));
    }
}
