//! Reuse distances of experts.

use moe_trace::{ExpertId, LayerId};

use super::units::{UnitId, Units};
use super::{Event, PassTokens};
use crate::stack::LruStack;

/// Histogram with power-of-two buckets. Bucket 0 counts the value 0, bucket `i` counts values in `2^(i-1)..2^i`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: Vec<u64>,
}

impl Histogram {
    fn add(&mut self, value: u64) {
        let bucket = (u64::BITS - value.leading_zeros()) as usize;
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
    }

    /// `(lower bound, exclusive upper bound, count)` of each non-empty bucket. The highest bucket has no upper bound.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, Option<u64>, u64)> {
        let buckets = (0u32..).zip(&self.counts).filter(|(_, count)| **count > 0);
        buckets.map(|(i, &count)| {
            let from = if i == 0 {
                0
            } else {
                1u64.checked_shl(i - 1).unwrap_or(0)
            };
            (from, 1u64.checked_shl(i), count)
        })
    }
}

/// Reuse of experts. A pass uses an expert if it reads some of the expert's bytes. It counts as one use for any number of
/// tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reuse {
    /// Number of uses.
    pub uses: u64,
    /// Uses of an expert that was used before.
    pub reuses: u64,
    /// Distances in tokens: tokens evaluated from the start of the pass of the previous use to the start of the current
    /// pass. 1 means that the previous token used the expert too.
    pub tokens: Histogram,
    /// Distances in bytes: total size of the distinct other experts and tensors read since the previous use.
    pub bytes: Histogram,
    /// All used experts, sorted by layer and expert.
    pub experts: Vec<ExpertReuse>,
}

/// Reuse of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertReuse {
    /// Block number.
    pub layer: LayerId,
    /// Expert id within the layer.
    pub expert: ExpertId,
    /// Total size of all tensors of the expert, in bytes.
    pub size_bytes: u64,
    /// Number of passes that used the expert.
    pub uses: u64,
    /// Reuse distances in tokens, as in [`Reuse::tokens`].
    pub tokens: Distances,
    /// Reuse distances in bytes, as in [`Reuse::bytes`].
    pub bytes: Distances,
}

/// Summary of the distances between consecutive uses of an expert, in tokens or bytes. There is one distance less than uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Distances {
    /// Number of distances.
    pub n: u64,
    /// Sum of the distances.
    pub sum: u64,
    /// Minimum; 0 if there are no distances.
    pub min: u64,
    /// Maximum; 0 if there are no distances.
    pub max: u64,
}

impl Distances {
    fn add(&mut self, distance: u64) {
        self.min = if self.n == 0 {
            distance
        } else {
            self.min.min(distance)
        };
        self.max = self.max.max(distance);
        self.sum = self.sum.saturating_add(distance);
        self.n += 1;
    }

    /// Mean distance; `None` if there are no distances.
    pub fn mean(&self) -> Option<f64> {
        (self.n > 0).then(|| self.sum as f64 / self.n as f64)
    }
}

#[derive(Clone, Copy, Default)]
struct Last {
    uses: u64,
    /// Tokens evaluated before the pass of the last use.
    clock: u64,
    /// Number of the pass of the last use, from 1.
    pass: u64,
    tokens: Distances,
    bytes: Distances,
}

pub(super) struct ReuseCounter {
    stack: LruStack,
    /// `[n_units]`
    last: Vec<Last>,
    reuse: Reuse,
    /// Tokens evaluated before the current pass.
    clock: u64,
    pass: u64,
}

impl ReuseCounter {
    pub(super) fn new(units: &Units) -> Self {
        let sizes = (0..units.len()).map(|unit| units.size(unit)).collect();
        Self {
            stack: LruStack::new(sizes),
            last: vec![Last::default(); units.len()],
            reuse: Reuse::default(),
            clock: 0,
            pass: 1,
        }
    }

    pub(super) fn access(&mut self, event: &Event) {
        let Some(last) = self.last.get_mut(event.unit) else {
            return;
        };
        if last.pass == self.pass {
            return;
        }
        let distance = self.stack.touch(event.unit);
        let tokens = self.clock - last.clock;
        (last.clock, last.pass) = (self.clock, self.pass);
        last.uses += 1;
        if !event.is_expert {
            return;
        }
        self.reuse.uses += 1;
        if let Some(bytes) = distance {
            self.reuse.reuses += 1;
            self.reuse.tokens.add(tokens);
            self.reuse.bytes.add(bytes);
            last.tokens.add(tokens);
            last.bytes.add(bytes);
        }
    }

    pub(super) fn end_pass(&mut self, pass: &PassTokens) {
        self.clock = self.clock.saturating_add(pass.n_tokens);
        self.pass += 1;
    }

    pub(super) fn finish(mut self, units: &Units) -> Reuse {
        let experts = self
            .last
            .iter()
            .enumerate()
            .filter(|(_, last)| last.uses > 0);
        let experts = experts.filter_map(|(unit, last): (UnitId, &Last)| {
            Some(ExpertReuse {
                layer: units.layer(unit)?,
                expert: units.expert(unit)?,
                size_bytes: units.size(unit),
                uses: last.uses,
                tokens: last.tokens,
                bytes: last.bytes,
            })
        });
        let mut experts: Vec<ExpertReuse> = experts.collect();
        experts.sort_unstable_by_key(|expert| (expert.layer, expert.expert));
        self.reuse.experts = experts;
        self.reuse
    }
}
