//! Comparison of the selected experts of two runs.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use moe_trace::{Expert, ExpertId, LayerId, Phase, Run, TokenExperts, TokenId};

use super::passes::Step;

/// Routing of two runs. Tokens are counted once per layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RoutingDiff {
    /// By layer.
    pub layers: BTreeMap<LayerId, LayerRouting>,
    /// The first routed tokens that differ, sorted by [`RoutingDifferenceKind`].
    pub first: Vec<RoutingDifference>,
}

/// Routing of one layer in two runs. Arrays are `[A, B]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerRouting {
    /// Number of tokens.
    pub tokens: [u64; 2],
    /// Number of tokens that only this run has.
    pub only: [u64; 2],
    /// Number of common tokens with different sets of experts.
    pub different_experts: u64,
    /// Number of common tokens with equal sets of experts in different order.
    pub different_order: u64,
    /// Number of common tokens with equal experts in the same order, and a weight difference above the tolerance.
    pub different_weights: u64,
    /// Maximum difference of an expert's weights, over common tokens with equal sets.
    pub max_weight_difference: f64,
    /// Sum and number of these differences. Plain v4 records have no weights.
    pub weight_differences: (f64, u64),
}

/// Kind of difference, in the order of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RoutingDifferenceKind {
    /// The sets of experts differ.
    Experts,
    /// Only A has the token.
    OnlyA,
    /// Only B has the token.
    OnlyB,
    /// The order of the experts differs.
    Order,
    /// A weight difference is above the tolerance.
    Weights,
}

impl RoutingDifferenceKind {
    const N: usize = 5;
}

/// A token that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutingDifference {
    /// Kind of difference.
    pub kind: RoutingDifferenceKind,
    /// Sequence of the token; `None` if neither run contains it.
    pub sequence_id: Option<u32>,
    /// Phase of the token.
    pub phase: Option<Phase>,
    /// Position of the token in its sequence.
    pub token_id: TokenId,
    /// Block number.
    pub layer: LayerId,
    /// Experts in the order of their slots, `[A, B]`; empty if the run does not have the token.
    pub experts: [Vec<Expert>; 2],
}

impl LayerRouting {
    /// Number of tokens that both runs have.
    pub fn in_both(&self) -> u64 {
        self.tokens[0] - self.only[0]
    }

    /// Fraction of the common tokens with equal sets of experts; `None` without common tokens.
    pub fn share_same_experts(&self) -> Option<f64> {
        let n = self.in_both();
        (n > 0).then(|| (n - self.different_experts) as f64 / n as f64)
    }

    /// Mean difference of the weights; `None` if no weights were compared.
    pub fn mean_weight_difference(&self) -> Option<f64> {
        let (sum, n) = self.weight_differences;
        (n > 0).then(|| sum / n as f64)
    }

    /// Whether no token differs.
    pub fn is_equal(&self) -> bool {
        self.only == [0, 0]
            && self.different_experts + self.different_order + self.different_weights == 0
    }

    fn add(&mut self, more: &LayerRouting) {
        for side in 0..2 {
            self.tokens[side] += more.tokens[side];
            self.only[side] += more.only[side];
        }
        self.different_experts += more.different_experts;
        self.different_order += more.different_order;
        self.different_weights += more.different_weights;
        self.max_weight_difference = self.max_weight_difference.max(more.max_weight_difference);
        self.weight_differences.0 += more.weight_differences.0;
        self.weight_differences.1 += more.weight_differences.1;
    }
}

impl RoutingDiff {
    /// Sum over all layers.
    pub fn total(&self) -> LayerRouting {
        let mut total = LayerRouting::default();
        self.layers.values().for_each(|layer| total.add(layer));
        total
    }

    /// Whether no token differs.
    pub fn is_equal(&self) -> bool {
        self.layers.values().all(LayerRouting::is_equal)
    }
}

/// Compares step by step.
pub(super) struct RoutingComparer<'r> {
    runs: [&'r Run; 2],
    limit: usize,
    weight_tolerance: f64,
    layers: BTreeMap<LayerId, LayerRouting>,
    /// By [`RoutingDifferenceKind`], at most `limit` tokens each.
    first: [Vec<RoutingDifference>; RoutingDifferenceKind::N],
}

/// A token in a layer of one run.
#[derive(Clone, Copy)]
struct RoutedToken<'r> {
    sequence_id: Option<u32>,
    token_id: TokenId,
    experts: TokenExperts<'r>,
}

impl RoutedToken<'_> {
    fn key(&self) -> (Option<u32>, TokenId) {
        (self.sequence_id, self.token_id)
    }
}

impl<'r> RoutingComparer<'r> {
    pub fn new(runs: [&'r Run; 2], limit: usize, weight_tolerance: f64) -> Self {
        RoutingComparer {
            runs,
            limit,
            weight_tolerance,
            layers: BTreeMap::new(),
            first: Default::default(),
        }
    }

    pub fn step(&mut self, step: &Step<'_>) {
        let mut layers: BTreeMap<LayerId, [Vec<RoutedToken<'r>>; 2]> = BTreeMap::new();
        for side in 0..2 {
            for pass in step.passes[side] {
                for operation in self.runs[side].routing_in(pass.records.clone()) {
                    if let Some(layer) = operation.head().layer() {
                        let tokens = operation.tokens().map(|experts| RoutedToken {
                            sequence_id: pass.sequence_id,
                            token_id: experts.token_id(),
                            experts,
                        });
                        layers.entry(layer).or_default()[side].extend(tokens);
                    }
                }
            }
        }
        for (layer, mut tokens) in layers {
            for tokens in &mut tokens {
                tokens.sort_by_key(RoutedToken::key);
            }
            self.layer(layer, tokens);
        }
    }

    /// Matches the tokens of a layer, which are sorted by their keys.
    fn layer(&mut self, layer: LayerId, [a, b]: [Vec<RoutedToken<'r>>; 2]) {
        let counts = self.layers.entry(layer).or_default();
        counts.tokens[0] += a.len() as u64;
        counts.tokens[1] += b.len() as u64;
        let (mut a, mut b) = (a.into_iter().peekable(), b.into_iter().peekable());
        loop {
            let order = match (a.peek(), b.peek()) {
                (None, None) => return,
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(a), Some(b)) => a.key().cmp(&b.key()),
            };
            let a = if order.is_le() { a.next() } else { None };
            let b = if order.is_ge() { b.next() } else { None };
            self.token(layer, a, b);
        }
    }

    /// Compares a token that at least one run has.
    fn token(&mut self, layer: LayerId, a: Option<RoutedToken<'r>>, b: Option<RoutedToken<'r>>) {
        let counts = self.layers.entry(layer).or_default();
        let kind = match (&a, &b) {
            (Some(a), Some(b)) => counts.compare(a, b, self.weight_tolerance),
            (Some(_), None) => {
                counts.only[0] += 1;
                Some(RoutingDifferenceKind::OnlyA)
            }
            (None, _) => {
                counts.only[1] += 1;
                Some(RoutingDifferenceKind::OnlyB)
            }
        };
        let (Some(kind), Some(token)) = (kind, a.or(b)) else {
            return;
        };
        let first = &mut self.first[kind as usize];
        if first.len() < self.limit {
            let experts = |token: Option<RoutedToken>| -> Vec<Expert> {
                token
                    .into_iter()
                    .flat_map(|token| token.experts.experts())
                    .collect()
            };
            first.push(RoutingDifference {
                kind,
                sequence_id: token.sequence_id,
                phase: token.experts.head().phase(),
                token_id: token.token_id,
                layer,
                experts: [experts(a), experts(b)],
            });
        }
    }

    pub fn finish(self) -> RoutingDiff {
        let mut first: Vec<RoutingDifference> = self.first.into_iter().flatten().collect();
        first.truncate(self.limit);
        RoutingDiff {
            layers: self.layers,
            first,
        }
    }
}

impl LayerRouting {
    /// Compares a token that both runs have, and counts the difference.
    fn compare(
        &mut self,
        a: &RoutedToken,
        b: &RoutedToken,
        weight_tolerance: f64,
    ) -> Option<RoutingDifferenceKind> {
        let mut experts = [a, b].map(|token| token.experts.experts().collect::<Vec<Expert>>());
        let ids = |experts: &[Expert]| {
            experts
                .iter()
                .map(|e| e.expert_id)
                .collect::<Vec<ExpertId>>()
        };
        let same_order = ids(&experts[0]) == ids(&experts[1]);
        for experts in &mut experts {
            experts.sort_by_key(|expert| expert.expert_id);
        }
        let [a, b] = experts;
        if ids(&a) != ids(&b) {
            self.different_experts += 1;
            return Some(RoutingDifferenceKind::Experts);
        }
        let mut max_difference = 0.0f64;
        for (a, b) in a.iter().zip(&b) {
            if let (Some(a), Some(b)) = (a.weight, b.weight) {
                let difference = difference(a, b);
                max_difference = max_difference.max(difference);
                self.weight_differences.0 += difference;
                self.weight_differences.1 += 1;
            }
        }
        self.max_weight_difference = self.max_weight_difference.max(max_difference);
        if !same_order {
            self.different_order += 1;
            Some(RoutingDifferenceKind::Order)
        } else if max_difference > weight_tolerance {
            self.different_weights += 1;
            Some(RoutingDifferenceKind::Weights)
        } else {
            None
        }
    }
}

/// Absolute difference of two weights. Infinite if exactly one is NaN, or both are different NaNs; 0 for equal bits.
fn difference(a: f32, b: f32) -> f64 {
    if a.to_bits() == b.to_bits() {
        return 0.0;
    }
    let difference = (f64::from(a) - f64::from(b)).abs();
    if difference.is_nan() {
        f64::INFINITY
    } else {
        difference
    }
}
