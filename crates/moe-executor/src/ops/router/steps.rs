//! The operations of a router. The CPU computes each of them unless one kernel has computed all; each is recorded.

use moe_trace::LayerId;

use super::{GROUPS_BUFFER, RouterState, SUMS_BUFFER, ids, small, weights};
use crate::activation::{Activation, NodeName};
use crate::hparams::{Gating, Groups};
use crate::ops::attention::unstored;
use crate::ops::{Ops, Scope, number};
use crate::recorder::{Routing, Source};
use crate::weights::Vector;

/// Lower bound of the sum that expert weights are divided by, like in llama.cpp: the smallest normal number of F16.
const MIN_WEIGHT_SUM: f32 = 6.103_515_6e-5;

impl Ops<'_> {
    /// Computes the probabilities of all experts from the scores.
    pub(super) fn gate(
        &mut self,
        scope: &mut Scope,
        name: NodeName,
        gating: Gating,
        state: &mut RouterState,
    ) {
        let (scores, probs) = (&state.scores, &mut state.probs);
        let width = scores.width;
        probs.shape(name, width, scores.rows);
        if !scope.is_done() {
            let probs = probs.data_mut();
            probs.copy_from_slice(scores.data());
            match gating {
                Gating::Sigmoid | Gating::SigmoidOfSelected => {
                    let sigmoid = |x: &mut f32| *x = 1.0 / (1.0 + (-*x).exp());
                    probs.iter_mut().for_each(sigmoid);
                }
                Gating::Softmax | Gating::SoftmaxOfSelected => {
                    probs.chunks_exact_mut(width).for_each(soft_max);
                }
            }
        }
        let op = match gating {
            Gating::Sigmoid | Gating::SigmoidOfSelected => number::UNARY,
            Gating::Softmax | Gating::SoftmaxOfSelected => number::SOFT_MAX,
        };
        self.record(scope, op, name, &[scores.into()]);
    }

    /// Adds the selection bias to a copy of the probabilities.
    pub(super) fn bias_selection(
        &mut self,
        scope: &mut Scope,
        name: NodeName,
        bias: &Vector,
        probs: &Activation,
        selection: &mut Activation,
    ) {
        if !scope.is_done() {
            for row in selection.data_mut().chunks_exact_mut(bias.n) {
                row.iter_mut().zip(&bias.data).for_each(|(x, b)| *x += b);
            }
        }
        selection.name = name;
        self.record(scope, number::ADD, name, &[probs.into(), bias.into()]);
    }

    /// Sets the probabilities of experts outside the best groups to minus infinity. Records the seven nodes of llama.cpp. On the CPU, the
    /// first has the time of the selection of the groups.
    pub(super) fn keep_best_groups(
        &mut self,
        scope: &mut Scope,
        il: LayerId,
        groups: Groups,
        selection: &mut Activation,
    ) {
        if scope.is_done() {
            // Records contain the size of the groups, which the kernel does not write.
            self.groups.resize(selection.rows * groups.n_used, 0);
        } else {
            self.select_groups(groups, selection);
        }
        let nodes = [
            "ffn_moe_group_argsort",
            "ffn_moe_group_best",
            "ffn_moe_group_sums",
            "ffn_moe_group_topk",
            "ffn_moe_group_kept",
            "ffn_moe_group_filled",
            "ffn_moe_probs_masked",
        ];
        let [order, two, sums, selected, kept, filled, masked] =
            nodes.map(|stem| NodeName::of(stem, il));
        let probs = Source::view(&*selection, " (reshaped)");
        self.record(scope, number::ARGSORT, order, &[probs]);
        let reshaped = Source::view(&*selection, " (reshaped) (reshaped)");
        let sources = [reshaped, unstored(order, " (view)")];
        self.record(scope, number::GET_ROWS, two, &sources);
        let source = unstored(two, " (reshaped)");
        self.record(scope, number::SUM_ROWS, sums, &[source]);
        let source = unstored(sums, " (reshaped)");
        self.record(scope, number::ARGSORT, selected, &[source]);

        let ids = small(selected, GROUPS_BUFFER, &self.groups, groups.n_used, "i32");
        self.record(scope, number::GET_ROWS, kept, &[probs, ids]);
        self.record(scope, number::FILL, filled, &[probs]);
        if !scope.is_done() {
            let (width, size) = (selection.width, selection.width / groups.n);
            let rows = selection.data_mut().chunks_exact_mut(width);
            for (row, best) in rows.zip(self.groups.chunks_exact(groups.n_used)) {
                for (group, values) in (0u32..).zip(row.chunks_exact_mut(size)) {
                    if !best.contains(&group) {
                        values.fill(f32::NEG_INFINITY);
                    }
                }
            }
        }
        // The result is a view of the node that was filled.
        selection.name = filled;
        let sources = [unstored(kept, ""), ids, (&*selection).into()];
        self.record(scope, number::SET_ROWS, masked, &sources);
    }

    /// Selects the groups with the highest sums of their two best experts.
    fn select_groups(&mut self, groups: Groups, selection: &Activation) {
        let (width, size) = (selection.width, selection.width / groups.n);
        self.sums.resize(groups.n, 0.0);
        self.groups.clear();
        for row in selection.data().chunks_exact(width) {
            for (sum, group) in self.sums.iter_mut().zip(row.chunks_exact(size)) {
                best(group, 2, &mut self.order);
                *sum = self.order[..2].iter().map(|&i| group[i as usize]).sum();
            }
            best(&self.sums, groups.n_used, &mut self.order);
            self.groups.extend(&self.order[..groups.n_used]);
        }
    }

    /// Selects the `k` best experts of each token, best first.
    pub(super) fn select(
        &mut self,
        scope: &mut Scope,
        il: LayerId,
        selection: &Activation,
        k: usize,
        routing: &mut Routing,
    ) {
        if !scope.is_done() {
            let ids = routing.ids.host_mut();
            ids.clear();
            for row in selection.data().chunks_exact(selection.width) {
                best(row, k, &mut self.order);
                ids.extend(self.order[..k].iter().map(|&id| id as i32));
            }
        }
        let name = NodeName::of("ffn_moe_argsort", il);
        self.record(scope, number::ARGSORT, name, &[selection.into()]);
    }

    /// Copies the probabilities of the selected experts to their weights.
    pub(super) fn expert_weights(
        &mut self,
        scope: &mut Scope,
        il: LayerId,
        probs: &Activation,
        routing: &mut Routing,
    ) -> NodeName {
        if !scope.is_done() {
            let weights = routing.weights.host_mut();
            weights.clear();
            let rows = probs.data().chunks_exact(probs.width);
            for (row, ids) in rows.zip(routing.ids.host().chunks_exact(routing.n_expert_used)) {
                weights.extend(ids.iter().map(|&id| row[id as usize]));
            }
        }
        let name = NodeName::of("ffn_moe_weights", il);
        let sources = [Source::view(probs, " (reshaped)"), ids(il, routing)];
        self.record(scope, number::GET_ROWS, name, &sources);
        name
    }

    /// Softmax over the expert weights of each token.
    pub(super) fn soft_max_weights(
        &mut self,
        scope: &mut Scope,
        il: LayerId,
        from: NodeName,
        routing: &mut Routing,
    ) -> NodeName {
        if !scope.is_done() {
            let rows = routing.weights.host_mut();
            rows.chunks_exact_mut(routing.n_expert_used)
                .for_each(soft_max);
        }
        let name = NodeName::of("ffn_moe_weights_softmax", il);
        let sources = [weights(from.reshaped(), routing)];
        self.record(scope, number::SOFT_MAX, name, &sources);
        name
    }

    /// Divides the expert weights of each token by their sum.
    pub(super) fn normalize_weights(
        &mut self,
        scope: &mut Scope,
        il: LayerId,
        from: NodeName,
        routing: &mut Routing,
    ) -> NodeName {
        let k = routing.n_expert_used;
        let [sum, clamped, norm] = [
            "ffn_moe_weights_sum",
            "ffn_moe_weights_sum_clamped",
            "ffn_moe_weights_norm",
        ]
        .map(|stem| NodeName::of(stem, il));
        let before = weights(from.reshaped(), routing);

        self.sums.clear();
        if scope.is_done() {
            // Records contain the size of the sums, which the kernel does not write.
            self.sums.resize(routing.weights.len() / k, 0.0);
        } else {
            let rows = routing.weights.host().chunks_exact(k);
            self.sums.extend(rows.map(|row| row.iter().sum::<f32>()));
        }
        self.record(scope, number::SUM_ROWS, sum, &[before]);

        let sums = self.sums.iter_mut();
        sums.for_each(|sum| *sum = sum.max(MIN_WEIGHT_SUM));
        let source = small(sum, SUMS_BUFFER, &self.sums, 1, "f32");
        self.record(scope, number::CLAMP, clamped, &[source]);

        if !scope.is_done() {
            let rows = routing.weights.host_mut().chunks_exact_mut(k);
            for (row, sum) in rows.zip(&self.sums) {
                row.iter_mut().for_each(|w| *w /= sum);
            }
        }
        let source = small(clamped, SUMS_BUFFER, &self.sums, 1, "f32");
        self.record(scope, number::DIV, norm, &[before, source]);
        norm.reshaped()
    }

    /// Multiplies all expert weights by `scale`.
    pub(super) fn scale_weights(
        &mut self,
        scope: &mut Scope,
        il: LayerId,
        from: NodeName,
        scale: f32,
        routing: &mut Routing,
    ) -> NodeName {
        if !scope.is_done() {
            let weights = routing.weights.host_mut();
            weights.iter_mut().for_each(|w| *w *= scale);
        }
        let name = NodeName::of("ffn_moe_weights_scaled", il);
        self.record(scope, number::SCALE, name, &[weights(from, routing)]);
        name
    }
}

/// Puts the indices of the `k` largest values of `row` at the start of `order`, largest first, ties by lower index. The
/// other elements of `order` are unspecified.
fn best(row: &[f32], k: usize, order: &mut Vec<u32>) {
    order.clear();
    order.extend(0..row.len() as u32);
    let better = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
    if k < row.len() {
        order.select_nth_unstable_by(k - 1, better);
    }
    order[..k].sort_unstable_by(better);
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
    fn soft_max_sums_to_one_with_large_scores() {
        let mut row = [1000.0, 1000.0 + 2f32.ln(), -1000.0];
        soft_max(&mut row);
        assert!(
            (row[0] - 1.0 / 3.0).abs() < 1e-4 && (row[1] - 2.0 / 3.0).abs() < 1e-4 && row[2] == 0.0
        );
    }
}
