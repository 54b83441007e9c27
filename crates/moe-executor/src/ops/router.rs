//! The router of a MoE layer: scores, choice of the best experts, and their weights.

use crate::activation::{Activation, NodeName};
use crate::ops::{Ops, Routed, number};
use crate::recorder::{Routing, Source};
use crate::weights::{Matrix, Vector};

/// How scores become probabilities.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the scores of the chosen experts alone (gpt-oss).
    SoftmaxOfChosen,
}

/// The router of one layer.
pub struct RouterSpec<'a, 'g> {
    /// Scores `(n_embd, n_expert)`.
    pub weights: &'a Matrix<'g>,
    /// Added to the scores.
    pub bias: Option<&'a Vector>,
    /// How scores become probabilities.
    pub gating: Gating,
    /// Whether the weights of the chosen are made to sum to one.
    pub norm_weights: bool,
    /// Experts that a token uses.
    pub n_expert_used: usize,
}

/// Smallest sum that the weights are divided by, as in llama.cpp: the smallest normal number of F16.
const MIN_WEIGHT_SUM: f32 = 6.103_515_6e-5;

impl Ops<'_> {
    /// Chooses experts for every row of `src`; `scores` and `probs` are scratch. Gives the name of the node that the
    /// weights come from.
    pub fn route(
        &mut self,
        il: usize,
        spec: &RouterSpec,
        src: &Activation,
        scores: &mut Activation,
        probs: &mut Activation,
        routing: &mut Routing,
    ) -> NodeName {
        let name = |stem| NodeName::of(stem, il);
        let softmax = spec.gating == Gating::Softmax;
        self.mul_mat(name("ffn_moe_logits"), spec.weights, src, scores);
        if let Some(bias) = spec.bias {
            // llama.cpp's name for biased scores that are taken as they are
            let biased = if softmax {
                "ffn_moe_logits_biased"
            } else {
                "ffn_moe_probs"
            };
            self.add_bias(name(biased), bias, scores);
        }
        self.check_finite(scores);
        if softmax {
            let start = self.recorder.start();
            probs.shape(name("ffn_moe_probs"), scores.width, scores.rows);
            probs.data_mut().copy_from_slice(scores.data());
            let width = probs.width;
            probs.data_mut().chunks_exact_mut(width).for_each(soft_max);
            self.record(start, number::SOFT_MAX, probs.name, &[(&*scores).into()]);
        }
        let probs: &Activation = if softmax { probs } else { scores };
        self.choose(il, probs, spec.n_expert_used, routing);
        let mut weights_name = name("ffn_moe_weights");
        if !softmax {
            weights_name = self.soft_max_chosen(il, weights_name, routing);
        }
        if spec.norm_weights {
            weights_name = self.normalise(il, weights_name, routing);
        }
        if let Some(mut observer) = self.observer.take() {
            let logits = scores.data();
            observer(&Routed {
                layer: il,
                positions: &self.positions,
                logits,
                routing,
            });
            self.observer = Some(observer);
        }
        weights_name
    }

    /// The `k` best of every row, best first, ties to the lower id; their probabilities become the first weights.
    fn choose(&mut self, il: usize, probs: &Activation, k: usize, routing: &mut Routing) {
        let start = self.recorder.start();
        routing.n_expert_used = k;
        routing.ids.clear();
        for row in probs.data().chunks_exact(probs.width) {
            self.order.clear();
            self.order.extend(0..row.len() as u32);
            let better =
                |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
            if k < row.len() {
                self.order.select_nth_unstable_by(k - 1, better);
            }
            self.order[..k].sort_unstable_by(better);
            routing
                .ids
                .extend(self.order[..k].iter().map(|&id| id as i32));
        }
        self.record(
            start,
            number::ARGSORT,
            NodeName::of("ffn_moe_argsort", il),
            &[probs.into()],
        );

        let start = self.recorder.start();
        routing.weights.clear();
        for (row, ids) in probs
            .data()
            .chunks_exact(probs.width)
            .zip(routing.ids.chunks_exact(k))
        {
            routing
                .weights
                .extend(ids.iter().map(|&id| row[id as usize]));
        }
        let sources = [Source::view(probs, " (reshaped)"), ids(il, routing)];
        self.record(
            start,
            number::GET_ROWS,
            NodeName::of("ffn_moe_weights", il),
            &sources,
        );
    }

    /// Softmax over the weights of every row.
    fn soft_max_chosen(&mut self, il: usize, from: NodeName, routing: &mut Routing) -> NodeName {
        let start = self.recorder.start();
        routing
            .weights
            .chunks_exact_mut(routing.n_expert_used)
            .for_each(soft_max);
        let name = NodeName::of("ffn_moe_weights_softmax", il);
        self.record(
            start,
            number::SOFT_MAX,
            name,
            &[weights(from, " (reshaped)", routing)],
        );
        name
    }

    /// Divides the weights of every row by their sum.
    fn normalise(&mut self, il: usize, from: NodeName, routing: &mut Routing) -> NodeName {
        let name = |stem| NodeName::of(stem, il);
        let before = weights(from, " (reshaped)", routing);

        let start = self.recorder.start();
        self.sums.clear();
        self.sums.extend(
            routing
                .weights
                .chunks_exact(routing.n_expert_used)
                .map(|row| row.iter().sum::<f32>()),
        );
        self.record(
            start,
            number::SUM_ROWS,
            name("ffn_moe_weights_sum"),
            &[before],
        );

        let start = self.recorder.start();
        self.sums
            .iter_mut()
            .for_each(|sum| *sum = sum.max(MIN_WEIGHT_SUM));
        let sums = |stem, sums: &[f32]| small(name(stem), "", SUMS_BUFFER, sums);
        let source = sums("ffn_moe_weights_sum", &self.sums);
        self.record(
            start,
            number::CLAMP,
            name("ffn_moe_weights_sum_clamped"),
            &[source],
        );

        let start = self.recorder.start();
        for (row, sum) in routing
            .weights
            .chunks_exact_mut(routing.n_expert_used)
            .zip(&self.sums)
        {
            row.iter_mut().for_each(|w| *w /= sum);
        }
        let source = sums("ffn_moe_weights_sum_clamped", &self.sums);
        self.record(
            start,
            number::DIV,
            name("ffn_moe_weights_norm"),
            &[before, source],
        );
        name("ffn_moe_weights_norm")
    }
}

/// Ids of the router's own small buffers, between those of the activations and the caches.
const IDS_BUFFER: u64 = (1 << 16) - 3;
const WEIGHTS_BUFFER: u64 = (1 << 16) - 2;
const SUMS_BUFFER: u64 = (1 << 16) - 1;

/// The chosen ids as a source.
pub(super) fn ids<'a>(il: usize, routing: &Routing) -> Source<'a> {
    small(
        NodeName::of("ffn_moe_topk", il),
        "",
        IDS_BUFFER,
        &routing.ids,
    )
}

/// The weights of the chosen as a source.
pub(super) fn weights<'a>(name: NodeName, suffix: &'static str, routing: &Routing) -> Source<'a> {
    small(name, suffix, WEIGHTS_BUFFER, &routing.weights)
}

fn small<'a, T>(name: NodeName, suffix: &'static str, buffer_id: u64, values: &[T]) -> Source<'a> {
    let (address, size_bytes) = (values.as_ptr() as u64, size_of_val(values) as u64);
    Source::Buffer {
        name,
        suffix,
        buffer_id,
        address,
        size_bytes,
    }
}

fn soft_max(row: &mut [f32]) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0f64;
    for x in row.iter_mut() {
        *x = (*x - max).exp();
        sum += f64::from(*x);
    }
    let scale = (1.0 / sum) as f32;
    row.iter_mut().for_each(|x| *x *= scale);
}

#[cfg(test)]
mod tests {
    use super::soft_max;

    #[test]
    fn soft_max_sums_to_one_and_survives_large_scores() {
        let mut row = [1000.0, 1000.0 + 2f32.ln(), -1000.0];
        soft_max(&mut row);
        assert!(
            (row[0] - 1.0 / 3.0).abs() < 1e-4 && (row[1] - 2.0 / 3.0).abs() < 1e-4 && row[2] == 0.0
        );
    }
}
