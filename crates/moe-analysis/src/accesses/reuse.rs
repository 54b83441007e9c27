//! How soon an expert is used again.

use moe_trace::{ExpertId, LayerId};

use super::units::{UnitId, Units};
use super::{Event, PassTokens};
use crate::stack::LruStack;

/// Counts by powers of two: bucket 0 holds the value 0, bucket `i` those from `2^(i-1)` to below `2^i`.
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

    /// (least value, values are below, count) of each bucket that is not empty; the last bucket of all has no end.
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

/// How soon experts are used again. A pass uses an expert if it reads some of its bytes, once however many tokens of its batch
/// chose it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reuse {
    /// Uses of experts.
    pub uses: u64,
    /// Uses of an expert that was used before.
    pub reuses: u64,
    /// Distance in tokens: tokens evaluated from the begin of the pass of the last use to the begin of the pass of this use;
    /// 1 = used for the token before, too.
    pub tokens: Histogram,
    /// Distance in bytes: those of the distinct experts and tensors read since the last use began, its own not counted.
    pub bytes: Histogram,
    /// Every expert that was used, by layer and expert.
    pub experts: Vec<ExpertReuse>,
}

/// How soon one expert is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertReuse {
    /// Layer.
    pub layer: LayerId,
    /// Expert in it.
    pub expert: ExpertId,
    /// Bytes of all its tensors.
    pub size_bytes: u64,
    /// Passes that used it.
    pub uses: u64,
    /// Sum, least and most of the distances in tokens.
    pub tokens: Distances,
    /// Sum, least and most of the distances in bytes.
    pub bytes: Distances,
}

/// Distances between uses: as many as uses, less the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Distances {
    /// How many.
    pub n: u64,
    /// Their sum.
    pub sum: u64,
    /// The least; 0 if there is none.
    pub min: u64,
    /// The most.
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

    /// The distance on average; `None` if there is none.
    pub fn mean(&self) -> Option<f64> {
        (self.n > 0).then(|| self.sum as f64 / self.n as f64)
    }
}

#[derive(Clone, Copy, Default)]
struct Last {
    uses: u64,
    /// Token clock of the last use.
    clock: u64,
    /// Pass of the last use, counted from 1.
    pass: u64,
    tokens: Distances,
    bytes: Distances,
}

pub(super) struct ReuseCounter {
    stack: LruStack,
    /// `[n_units]`
    last: Vec<Last>,
    reuse: Reuse,
    /// Tokens evaluated before this pass.
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
