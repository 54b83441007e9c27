//! LRU at many budgets from a sample of the experts, for traces that are too long to follow them all.
//!
//! A hash decides which experts are followed (SHARDS: Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015):
//! of those every look-up is seen, of the others none, and what is counted between two look-ups of an expert is scaled up.
//! Here every layer gives the same share of its experts, those with the lowest hashes, since a pass goes through all layers;
//! and what is scaled up are misses, while all look-ups are known, which is the paper's adjustment for hot experts that are in
//! the sample or not.
//!
//! An LRU cache holds between batches the most recent experts whose bytes fit, and the whole batch that just ended. So a
//! look-up hits if its expert was in the batch before, or if it and the experts used since its last use fit, whether sizes
//! are equal or not.
//!
//! The error is told by random groups (Wolter, "Introduction to Variance Estimation", chapter 2): the sample is dealt into
//! [`N_GROUPS`] groups that each give a curve as if there were no others, and their spread tells how far a sample's curve
//! lies from the truth.

use moe_placement::cache::{Experts, Key};
use moe_placement::random::SplitMix64;

use super::{Batches, Error, Outcome};
use crate::stack::LruStack;

/// Groups of the sample.
const N_GROUPS: usize = 8;

/// Student's t for an interval of 95 % and N_GROUPS - 1 degrees of freedom.
const T_95: f64 = 2.365;

/// What an LRU cache of a budget does, estimated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Bytes that it may hold.
    pub budget: u64,
    /// Look-ups are counted, everything else is estimated.
    pub outcome: Outcome,
    /// Half of the 95 % interval of [`Outcome::hit_pct_cum`], points.
    pub error_pct_cum: f64,
    /// Half of the 95 % interval of [`Outcome::hit_pct_decode`], points.
    pub error_pct_decode: f64,
}

/// LRU at all budgets, from the share `rate` of each layer's experts, at least one; `seed` chooses which. Memory and time go
/// with the share; a rate of 1 follows all and has no error.
///
/// # Errors
/// [`Error::Sample`] if the sample is too small to tell its error.
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
            least: 2 * N_GROUPS,
        });
    }
    let mut sorted = budgets.to_vec();
    sorted.sort_unstable();
    let mut curves = vec![Curve::new(experts, &sample, &sorted, 0, 1)];
    curves
        .extend((0..N_GROUPS).map(|group| Curve::new(experts, &sample, &sorted, group, N_GROUPS)));
    let look_ups = follow(batches, &sample, &mut curves);
    let [whole, groups @ ..] = &curves[..] else {
        return Ok(Vec::new());
    };
    let left_out = 1.0 - sample.keys.len() as f64 / experts.len() as f64;
    let error = |phases: &[usize], budget| {
        let all: u64 = phases.iter().map(|&phase| look_ups[phase]).sum();
        let missed = groups.iter().map(|group| {
            let missed = group.beyond(budget);
            let missed: f64 = phases.iter().map(|&phase| missed.look_ups[phase]).sum();
            100.0 * missed / all.max(1) as f64
        });
        T_95 * standard_error(&missed.collect::<Vec<_>>()) * left_out.sqrt()
    };
    let estimates = budgets.iter().map(|&budget| Estimate {
        budget,
        outcome: whole.outcome(budget, look_ups),
        error_pct_cum: error(&[0, 1, 2], budget),
        error_pct_decode: error(&[1], budget),
    });
    Ok(estimates.collect())
}

/// Shows the sampled experts' look-ups to the curves; gives the number of all look-ups by phase.
fn follow(batches: &Batches, sample: &Sample, curves: &mut [Curve]) -> [u64; 3] {
    let mut look_ups = [0; 3];
    // `[n_sampled]`: the batch of the last look-up, counted from 1.
    let mut last_batch = vec![0u32; sample.keys.len()];
    let mut chosen: Vec<(usize, bool)> = Vec::new();
    for (number, batch) in (1u32..).zip(batches.iter()) {
        let phase = batch.phase();
        chosen.clear();
        for (key, again) in batch.choices() {
            look_ups[phase] += u64::from(!again);
            if let Some(at) = sample.place(key) {
                chosen.push((at, again));
            }
        }
        for &(at, again) in &chosen {
            if !again {
                let last = std::mem::replace(&mut last_batch[at], number);
                let is_kept = last > 0 && last + 1 == number;
                for curve in curves_of(at) {
                    curves[curve].look_up(at, phase, is_kept);
                }
            }
        }
        for &(at, _) in &chosen {
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

/// The curve of all, and that of the group of the expert at this place.
fn curves_of(at: usize) -> [usize; 2] {
    [0, 1 + at % N_GROUPS]
}

/// The experts that are followed.
struct Sample {
    keys: Vec<Key>,
    /// `[n_sampled]`: experts of its layer that each stands for.
    weights: Vec<f64>,
    /// `[n_keys]`: place in `keys`, or [`NOT_SAMPLED`].
    places: Vec<u32>,
}

const NOT_SAMPLED: u32 = u32::MAX;

impl Sample {
    fn new(experts: &Experts, rate: f64, seed: u64) -> Sample {
        let mut sample = Sample {
            keys: Vec::new(),
            weights: Vec::new(),
            places: vec![NOT_SAMPLED; experts.len()],
        };
        let hash = |key: Key| {
            let state = SplitMix64::new(seed).next_u64().wrapping_add(key.into());
            SplitMix64::new(state).next_u64()
        };
        for layer in 0..experts.n_layer() {
            let mut keys: Vec<Key> = experts.keys_of(layer).collect();
            keys.sort_by_key(|&key| hash(key));
            let wanted = (rate * keys.len() as f64).ceil() as usize;
            let wanted = wanted.clamp(1, keys.len());
            for &key in &keys[..wanted] {
                sample.places[key as usize] = sample.keys.len() as u32;
                sample.keys.push(key);
                sample.weights.push(keys.len() as f64 / wanted as f64);
            }
        }
        sample
    }

    fn place(&self, key: Key) -> Option<usize> {
        let place = self.places[key as usize];
        (place != NOT_SAMPLED).then_some(place as usize)
    }
}

/// Look-ups and their bytes, by phase, each times what its expert stands for.
#[derive(Debug, Clone, Copy, Default)]
struct Weighed {
    look_ups: [f64; 3],
    bytes: [f64; 3],
    /// Experts that a cache holds in the end.
    held: f64,
}

/// What every `step`-th expert of the sample tells.
struct Curve {
    /// Ascending.
    budgets: Vec<u64>,
    step: usize,
    stack: LruStack,
    /// `[n_sampled]`
    bytes: Vec<u64>,
    /// `[n_sampled]`: by how much the bytes of the other experts here are too few.
    scales: Vec<f64>,
    /// `[n_sampled]`: experts that each stands for.
    weights: Vec<f64>,
    /// `[n_budgets + 1]`: what the budget of this index is the first to hold; the last one: what none does.
    first_held: Vec<Weighed>,
}

impl Curve {
    /// From the place `first` on.
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
            first_held: vec![Weighed::default(); budgets.len() + 1],
        }
    }

    /// The least budget that holds an expert, by what was used since its last use.
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

    /// Notes what is held in the end.
    fn end(&mut self, at: usize, is_kept: bool) {
        let needed = self.needed(at, is_kept);
        self.first_held[needed].held += self.weights[at];
    }

    /// What a cache of a budget of `budgets` does not hold.
    fn beyond(&self, budget: u64) -> Weighed {
        let first = self.budgets.partition_point(|&other| other <= budget);
        let mut sum = Weighed::default();
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

/// Of the mean of values that are independent of each other.
fn standard_error(values: &[f64]) -> f64 {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (n * (n - 1.0))).sqrt()
}
