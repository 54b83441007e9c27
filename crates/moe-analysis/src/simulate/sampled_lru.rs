//! LRU for many budgets from a sample of the experts, for very long traces.
//!
//! A hash selects the sampled experts (SHARDS: Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015).
//! Every look-up of a sampled expert is replayed, and stack distances are scaled up. Unlike SHARDS, each layer contributes
//! the same fraction of its experts, those with the lowest hashes, because every pass visits all layers. The misses are
//! scaled up, while all look-ups are counted. This corresponds to the adjustment of the paper (SHARDS-adj), which corrects
//! for hot experts in or outside the sample.
//!
//! Between batches an LRU cache contains the most recently used experts that fit, and the entire last batch. A look-up is a
//! hit if its expert was in the previous batch, or if the expert and all experts used since its last use fit. Sizes may
//! differ.
//!
//! The error is estimated with random groups (Wolter, *Introduction to Variance Estimation*, chapter 2): the sample is
//! divided into [`N_GROUPS`] groups, each group yields its own curve, and the spread of the curves estimates the error of
//! the sample.

use moe_placement::cache::{Experts, Key};
use moe_placement::random::SplitMix64;

use super::{Batches, Error, Outcome};
use crate::stack::LruStack;

/// Number of groups of the sample.
const N_GROUPS: usize = 8;

/// Quantile of Student's t distribution for a 95 % interval with `N_GROUPS` - 1 degrees of freedom.
const T_95: f64 = 2.365;

/// Estimated result of an LRU cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Budget in bytes.
    pub budget: u64,
    /// The result. Look-ups are exact, all other values are estimates.
    pub outcome: Outcome,
    /// Half-width of the 95 % interval of [`Outcome::hit_pct_cum`], in percentage points.
    pub error_pct_cum: f64,
    /// Half-width of the 95 % interval of [`Outcome::hit_pct_decode`], in percentage points.
    pub error_pct_decode: f64,
}

/// Simulates LRU with all budgets (bytes) on the fraction `rate` of each layer's experts, at least one per layer. `seed`
/// determines the sample. Memory and time are proportional to the rate. A rate of 1.0 is exact, with an error of 0.
///
/// # Errors
/// [`Error::Sample`] if the sample is too small to estimate the error.
pub fn sampled_lru(
    batches: &Batches,
    budgets: &[u64],
    rate: f64,
    seed: u64,
) -> Result<Vec<Estimate>, Error> {
    let experts = batches.experts();
    let sample = Sample::new(experts, rate, seed);
    if sample.keys.len() < 2 * N_GROUPS {
        return Err(Error::Sample {
            n: sample.keys.len(),
            min: 2 * N_GROUPS,
        });
    }
    let mut sorted = budgets.to_vec();
    sorted.sort_unstable();
    let mut curves = vec![Curve::new(experts, &sample, &sorted, 0, 1)];
    curves
        .extend((0..N_GROUPS).map(|group| Curve::new(experts, &sample, &sorted, group, N_GROUPS)));
    let look_ups = follow(batches, &sample, &mut curves);
    let [full, groups @ ..] = &curves[..] else {
        return Ok(Vec::new());
    };
    let unsampled = 1.0 - sample.keys.len() as f64 / experts.len() as f64;
    let error = |phases: &[usize], budget| {
        let all: u64 = phases.iter().map(|&phase| look_ups[phase]).sum();
        let missed = groups.iter().map(|group| {
            let missed = group.beyond(budget);
            let missed: f64 = phases.iter().map(|&phase| missed.look_ups[phase]).sum();
            100.0 * missed / all.max(1) as f64
        });
        T_95 * standard_error(&missed.collect::<Vec<_>>()) * unsampled.sqrt()
    };
    let estimates = budgets.iter().map(|&budget| Estimate {
        budget,
        outcome: full.outcome(budget, look_ups),
        error_pct_cum: error(&[0, 1, 2], budget),
        error_pct_decode: error(&[1], budget),
    });
    Ok(estimates.collect())
}

/// Replays the look-ups of sampled experts in all curves. Returns the number of all look-ups by phase.
fn follow(batches: &Batches, sample: &Sample, curves: &mut [Curve]) -> [u64; 3] {
    let mut look_ups = [0; 3];
    // `[n_sampled]`: number of the batch with the last look-up, from 1.
    let mut last_batch = vec![0u32; sample.keys.len()];
    let mut selected: Vec<(usize, bool)> = Vec::new();
    for (number, batch) in (1u32..).zip(batches.iter()) {
        let phase = batch.phase();
        selected.clear();
        for (key, again) in batch.selections() {
            look_ups[phase] += u64::from(!again);
            if let Some(at) = sample.index(key) {
                selected.push((at, again));
            }
        }
        for &(at, again) in &selected {
            if !again {
                let last = std::mem::replace(&mut last_batch[at], number);
                let is_kept = last > 0 && last + 1 == number;
                for curve in curves_of(at) {
                    curves[curve].look_up(at, phase, is_kept);
                }
            }
        }
        for &(at, _) in &selected {
            for curve in curves_of(at) {
                curves[curve].touch(at);
            }
        }
    }
    let n_batches = batches.n_batches() as u32;
    for (at, &last) in last_batch.iter().enumerate() {
        for curve in curves_of(at) {
            curves[curve].end(at, last == n_batches);
        }
    }
    look_ups
}

/// Indices of the two curves that contain the sampled expert: the full curve, and that of its group.
fn curves_of(at: usize) -> [usize; 2] {
    [0, 1 + at % N_GROUPS]
}

/// The sampled experts.
struct Sample {
    keys: Vec<Key>,
    /// `[n_sampled]`: number of experts of its layer that each sampled expert represents.
    weights: Vec<f64>,
    /// `[n_keys]`: index in `keys`, or [`NOT_SAMPLED`].
    indices: Vec<u32>,
}

const NOT_SAMPLED: u32 = u32::MAX;

impl Sample {
    fn new(experts: &Experts, rate: f64, seed: u64) -> Sample {
        let mut sample = Sample {
            keys: Vec::new(),
            weights: Vec::new(),
            indices: vec![NOT_SAMPLED; experts.len()],
        };
        let hash = |key: Key| {
            let state = SplitMix64::new(seed).next_u64().wrapping_add(key.into());
            SplitMix64::new(state).next_u64()
        };
        for layer in 0..experts.n_layer() {
            let mut keys: Vec<Key> = experts.keys_of(layer).collect();
            keys.sort_by_key(|&key| hash(key));
            let n_sampled = (rate * keys.len() as f64).ceil() as usize;
            let n_sampled = n_sampled.clamp(1, keys.len());
            for &key in &keys[..n_sampled] {
                sample.indices[key as usize] = sample.keys.len() as u32;
                sample.keys.push(key);
                sample.weights.push(keys.len() as f64 / n_sampled as f64);
            }
        }
        sample
    }

    fn index(&self, key: Key) -> Option<usize> {
        let index = self.indices[key as usize];
        (index != NOT_SAMPLED).then_some(index as usize)
    }
}

/// Weighted look-ups and bytes by phase.
#[derive(Debug, Clone, Copy, Default)]
struct WeightedCounts {
    look_ups: [f64; 3],
    bytes: [f64; 3],
    /// Number of experts in the cache at the end.
    held: f64,
}

/// The LRU curve of every `step`-th expert of the sample.
struct Curve {
    /// Budgets in ascending order.
    budgets: Vec<u64>,
    step: usize,
    stack: LruStack,
    /// `[n_sampled]`: size of each expert in bytes.
    bytes: Vec<u64>,
    /// `[n_sampled]`: factor from the bytes of the other experts in this curve to those of all other experts.
    scales: Vec<f64>,
    /// `[n_sampled]`: number of experts that each represents.
    weights: Vec<f64>,
    /// `[n_budgets + 1]`: look-ups for which this budget is the smallest with a hit. The last element: misses in all
    /// budgets.
    first_held: Vec<WeightedCounts>,
}

impl Curve {
    /// The curve of the experts `first`, `first + step`, … of the sample.
    fn new(
        experts: &Experts,
        sample: &Sample,
        budgets: &[u64],
        first: usize,
        step: usize,
    ) -> Curve {
        let bytes: Vec<u64> = sample.keys.iter().map(|&key| experts.bytes(key)).collect();
        let here: Vec<u64> = bytes.iter().copied().skip(first).step_by(step).collect();
        let share = here.len() as f64 / bytes.len() as f64;
        let all_here = here.iter().copied().fold(0, u64::saturating_add);
        let scale = |&own: &u64| {
            let others = experts.total_bytes().saturating_sub(own) as f64;
            others / all_here.saturating_sub(own).max(1) as f64
        };
        Curve {
            budgets: budgets.to_vec(),
            step,
            stack: LruStack::new(here),
            scales: bytes.iter().map(scale).collect(),
            weights: sample.weights.iter().map(|weight| weight / share).collect(),
            bytes,
            first_held: vec![WeightedCounts::default(); budgets.len() + 1],
        }
    }

    /// Index of the smallest budget that still holds the expert, given its stack distance.
    fn needed(&self, at: usize, is_kept: bool) -> usize {
        if is_kept {
            return 0;
        }
        let Some(distance) = self.stack.distance(at / self.step) else {
            return self.budgets.len();
        };
        let depth = self.bytes[at] as f64 + distance as f64 * self.scales[at];
        self.budgets
            .partition_point(|&budget| (budget as f64) < depth)
    }

    fn look_up(&mut self, at: usize, phase: usize, is_kept: bool) {
        let needed = self.needed(at, is_kept);
        let weighed = &mut self.first_held[needed];
        weighed.look_ups[phase] += self.weights[at];
        weighed.bytes[phase] += self.weights[at] * self.bytes[at] as f64;
    }

    fn touch(&mut self, at: usize) {
        self.stack.touch(at / self.step);
    }

    /// Records whether the expert is in the cache at the end.
    fn end(&mut self, at: usize, is_kept: bool) {
        let needed = self.needed(at, is_kept);
        self.first_held[needed].held += self.weights[at];
    }

    /// Misses of a cache with this budget.
    fn beyond(&self, budget: u64) -> WeightedCounts {
        let first = self.budgets.partition_point(|&other| other <= budget);
        let mut sum = WeightedCounts::default();
        for weighed in &self.first_held[first..] {
            for phase in 0..3 {
                sum.look_ups[phase] += weighed.look_ups[phase];
                sum.bytes[phase] += weighed.bytes[phase];
            }
        }
        sum
    }

    fn outcome(&self, budget: u64, look_ups: [u64; 3]) -> Outcome {
        let missed = self.beyond(budget);
        let first = self.budgets.partition_point(|&other| other <= budget);
        let held: f64 = self.first_held[..first]
            .iter()
            .map(|weighed| weighed.held)
            .sum();
        let misses: [u64; 3] = std::array::from_fn(|phase| {
            (missed.look_ups[phase].round() as u64).min(look_ups[phase])
        });
        Outcome {
            look_ups,
            hits: std::array::from_fn(|phase| look_ups[phase] - misses[phase]),
            read_bytes: missed.bytes.map(|bytes| bytes.round() as u64),
            loaded_bytes: 0,
            evictions: misses
                .iter()
                .sum::<u64>()
                .saturating_sub(held.round() as u64),
        }
    }
}

/// Standard error of the mean of independent values.
fn standard_error(values: &[f64]) -> f64 {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (n * (n - 1.0))).sqrt()
}
