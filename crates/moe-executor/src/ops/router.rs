//! The router of a MoE layer: scores, choice of the best experts, and their weights.

use crate::activation::{Activation, NodeName};
use crate::buffers::{Input, Inventory, twin_id};
use crate::cuda::launch::{MAX_EXPERTS, Route};
use crate::mirrored::{Mirrored, Plain};
use crate::ops::{Ops, Routed, number};
use crate::placement::Side;
use crate::recorder::{Routing, Source};
use crate::weights::{Linear, Vector};

/// How scores become probabilities.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// Every expert by itself.
    Sigmoid,
    /// Softmax over the scores of the chosen experts alone (gpt-oss).
    SoftmaxOfChosen,
}

/// Experts are chosen from the best groups only ("DeepSeek-V3 Technical Report", 2024, section 2.1.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Groups {
    /// Groups of the same size, two experts or more.
    pub n: usize,
    /// Groups that a token uses, those whose two best experts have the highest sum.
    pub n_used: usize,
}

/// The router of one layer.
pub struct RouterSpec<'a, 'g> {
    /// Scores `(n_embd, n_expert)`.
    pub scores: &'a Linear<'g>,
    /// How scores become probabilities.
    pub gating: Gating,
    /// Added to the probabilities for the choice, not for the weights `(n_expert)`.
    pub selection_bias: Option<&'a Vector>,
    /// Groups that experts are chosen from.
    pub groups: Option<Groups>,
    /// Whether the weights of the chosen are made to sum to one.
    pub norm_weights: bool,
    /// Factor on the weights.
    pub weights_scale: f32,
    /// Experts that a token uses.
    pub n_expert_used: usize,
}

/// Buffers of a router, each `(row, n_expert)`.
pub struct RouterState {
    scores: Activation,
    probs: Activation,
    selection: Activation,
}

impl RouterState {
    /// Buffers whose ids start at `first_id`.
    pub fn new(first_id: u64) -> RouterState {
        RouterState {
            scores: Activation::new(first_id),
            probs: Activation::new(first_id + 1),
            selection: Activation::new(first_id + 2),
        }
    }
}

impl RouterState {
    /// Its buffers.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("router scores", &self.scores);
        inventory.activation("router probabilities", &self.probs);
        inventory.activation("router selection", &self.selection);
    }
}

impl Routing {
    /// Its buffers.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.mirrored(IDS_BUFFER, "chosen experts", &self.ids);
        inventory.mirrored(WEIGHTS_BUFFER, "weights of the chosen", &self.weights);
    }
}

/// Smallest sum that the weights are divided by, as in llama.cpp: the smallest normal number of F16.
const MIN_WEIGHT_SUM: f32 = 6.103_515_6e-5;

impl Ops<'_> {
    /// Buffers that operations use beside those of their results.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.vector(Input::Positions.buffer_id(), "positions", &self.positions);
        inventory.vector(GROUPS_BUFFER, "expert groups", &self.groups);
        inventory.vector(SUMS_BUFFER, "sums of weights", &self.sums);
        inventory.vector(
            QUANTIZED_BUFFER,
            "quantized activations",
            self.quantized.room(),
        );
    }

    /// Chooses experts for every row of `src`. Gives the name of the node that the weights come from.
    pub fn route(
        &mut self,
        il: usize,
        spec: &RouterSpec,
        src: &mut Activation,
        state: &mut RouterState,
        routing: &mut Routing,
    ) -> NodeName {
        let name = |stem| NodeName::of(stem, il);
        let of_chosen = spec.gating == Gating::SoftmaxOfChosen;
        let biased = match of_chosen {
            true => "ffn_moe_probs", // llama.cpp's name for scores that are taken as they are
            false => "ffn_moe_logits_biased",
        };
        let names = ["ffn_moe_logits", biased].map(name);
        self.linear(names, spec.scores, src, &mut state.scores);
        self.choose_on_gpu(spec, state, routing);
        self.check_finite(&state.scores);
        if !of_chosen {
            self.gate(name("ffn_moe_probs"), spec.gating, state);
        }
        let probs = if of_chosen {
            &state.scores
        } else {
            &state.probs
        };
        let mut chosen_by = probs;
        if spec.selection_bias.is_some() || spec.groups.is_some() {
            let selection = &mut state.selection;
            selection.shape(probs.name, probs.width, probs.rows);
            if !self.is_done() {
                selection.data_mut().copy_from_slice(probs.data());
            }
            if let Some(bias) = spec.selection_bias {
                self.bias_selection(name("ffn_moe_probs_biased"), bias, probs, selection);
            }
            if let Some(groups) = spec.groups {
                self.keep_best_groups(il, groups, selection);
            }
            chosen_by = selection;
        }
        self.choose(il, chosen_by, spec.n_expert_used, routing);
        let mut from = self.weigh(il, probs, routing);
        if of_chosen {
            from = self.soft_max_chosen(il, from, routing);
        }
        if spec.norm_weights {
            from = self.normalise(il, from, routing);
        }
        if spec.weights_scale != 1.0 {
            from = self.scale_weights(il, from, spec.weights_scale, routing);
        }
        if let Some(mut observer) = self.observer.take() {
            self.fetch(&mut state.scores.values);
            self.routing_to_host(routing);
            observer(&Routed {
                layer: il,
                positions: &self.positions,
                logits: state.scores.data(),
                routing,
            });
            self.observer = Some(observer);
        }
        from
    }

    /// Does all that follows the scores in one kernel, if they are on the GPU. The operations of the router then only tell.
    fn choose_on_gpu(&mut self, spec: &RouterSpec, state: &mut RouterState, routing: &mut Routing) {
        let scores = &mut state.scores;
        let (tokens, n_expert, k) = (scores.rows, scores.width, spec.n_expert_used);
        routing.n_expert_used = k;
        routing.ids.resize(tokens * k);
        routing.weights.resize(tokens * k);
        self.start();
        let fits = spec.groups.is_none() && n_expert <= MAX_EXPERTS;
        let side = match fits && scores.values.is_on_device_alone() {
            true => Side::Gpu,
            false => Side::Host,
        };
        let done = self.on(side, |device| {
            let selection_bias = device.optional(spec.selection_bias)?;
            let gpu = device.gpu();
            let route = Route {
                logits: scores.values.device(gpu)?,
                selection_bias,
                gating: spec.gating,
                norm: spec.norm_weights,
                scale: spec.weights_scale,
                tokens,
                n_expert,
                k,
            };
            let ids = routing.ids.fill_device(gpu)?;
            let weights = routing.weights.fill_device(gpu)?;
            let kernels = device.kernels();
            kernels.route(device.stream(), &route, ids, weights)
        });
        routing.copy = None;
        if done {
            self.download(routing);
            self.state_shapes(state);
        } else {
            self.fetch(&mut state.scores.values);
        }
    }

    /// Begins to copy a choice that only the GPU has, if it is to be recorded.
    fn download(&mut self, routing: &mut Routing) {
        if let Some(device) = &mut self.device
            && self.recorder.is_on()
            && let Err(error) = device.begin_download(routing)
        {
            // Recording then waits for it.
            device.fallbacks.note(&error);
            self.routing_to_host(routing);
        }
    }

    /// Names and shapes that a kernel for the whole router leaves out.
    fn state_shapes(&self, state: &mut RouterState) {
        let (name, width, rows) = (state.scores.name, state.scores.width, state.scores.rows);
        state.probs.shape(name, width, rows);
        state.selection.shape(name, width, rows);
    }

    /// Fetches the choice if only the GPU has it.
    pub(super) fn routing_to_host(&mut self, routing: &mut Routing) {
        self.fetch(&mut routing.ids);
        self.fetch(&mut routing.weights);
    }

    /// Probabilities of all experts.
    fn gate(&mut self, name: NodeName, gating: Gating, state: &mut RouterState) {
        let start = self.recorder.start();
        let (scores, probs) = (&state.scores, &mut state.probs);
        let width = scores.width;
        probs.shape(name, width, scores.rows);
        if !self.is_done() {
            let probs = probs.data_mut();
            probs.copy_from_slice(scores.data());
            match gating {
                Gating::Sigmoid => {
                    let sigmoid = |x: &mut f32| *x = 1.0 / (1.0 + (-*x).exp());
                    probs.iter_mut().for_each(sigmoid);
                }
                Gating::Softmax | Gating::SoftmaxOfChosen => {
                    probs.chunks_exact_mut(width).for_each(soft_max);
                }
            }
        }
        let op = match gating {
            Gating::Sigmoid => number::UNARY,
            Gating::Softmax | Gating::SoftmaxOfChosen => number::SOFT_MAX,
        };
        self.record(start, op, name, &[scores.into()]);
    }

    /// Adds the bias of the choice to a copy of the probabilities.
    fn bias_selection(
        &mut self,
        name: NodeName,
        bias: &Vector,
        probs: &Activation,
        selection: &mut Activation,
    ) {
        let start = self.recorder.start();
        if !self.is_done() {
            for row in selection.data_mut().chunks_exact_mut(bias.n) {
                row.iter_mut().zip(&bias.data).for_each(|(x, b)| *x += b);
            }
        }
        selection.name = name;
        self.record(start, number::ADD, name, &[probs.into(), bias.into()]);
    }

    /// Sets all experts but those of the best groups to minus infinity.
    fn keep_best_groups(&mut self, il: usize, groups: Groups, selection: &mut Activation) {
        let start = self.recorder.start();
        let width = selection.width;
        let size = width / groups.n;
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
        let name = NodeName::of("ffn_moe_group_topk", il);
        self.record(start, number::ARGSORT, name, &[(&*selection).into()]);

        let start = self.recorder.start();
        let before = Source::from(&*selection);
        let rows = selection.data_mut().chunks_exact_mut(width);
        for (row, kept) in rows.zip(self.groups.chunks_exact(groups.n_used)) {
            for (group, values) in (0u32..).zip(row.chunks_exact_mut(size)) {
                if !kept.contains(&group) {
                    values.fill(f32::NEG_INFINITY);
                }
            }
        }
        selection.name = NodeName::of("ffn_moe_probs_masked", il);
        let kept = small(name, GROUPS_BUFFER, &self.groups, groups.n_used, "i32");
        self.record(start, number::SET_ROWS, selection.name, &[before, kept]);
    }

    /// The `k` best of every row, best first.
    fn choose(&mut self, il: usize, selection: &Activation, k: usize, routing: &mut Routing) {
        let start = self.recorder.start();
        if !self.is_done() {
            let ids = routing.ids.host_mut();
            ids.clear();
            for row in selection.data().chunks_exact(selection.width) {
                best(row, k, &mut self.order);
                ids.extend(self.order[..k].iter().map(|&id| id as i32));
            }
        }
        let name = NodeName::of("ffn_moe_argsort", il);
        self.record(start, number::ARGSORT, name, &[selection.into()]);
    }

    /// The probabilities of the chosen become their first weights.
    fn weigh(&mut self, il: usize, probs: &Activation, routing: &mut Routing) -> NodeName {
        let start = self.recorder.start();
        if !self.is_done() {
            let weights = routing.weights.host_mut();
            weights.clear();
            let rows = probs.data().chunks_exact(probs.width);
            for (row, ids) in rows.zip(routing.ids.host().chunks_exact(routing.n_expert_used)) {
                weights.extend(ids.iter().map(|&id| row[id as usize]));
            }
        }
        let name = NodeName::of("ffn_moe_weights", il);
        let sources = [Source::view(probs, " (reshaped)"), ids(il, routing)];
        self.record(start, number::GET_ROWS, name, &sources);
        name
    }

    /// Softmax over the weights of every row.
    fn soft_max_chosen(&mut self, il: usize, from: NodeName, routing: &mut Routing) -> NodeName {
        let start = self.recorder.start();
        if !self.is_done() {
            let rows = routing.weights.host_mut();
            rows.chunks_exact_mut(routing.n_expert_used)
                .for_each(soft_max);
        }
        let name = NodeName::of("ffn_moe_weights_softmax", il);
        let sources = [weights(from.reshaped(), routing)];
        self.record(start, number::SOFT_MAX, name, &sources);
        name
    }

    /// Divides the weights of every row by their sum.
    fn normalise(&mut self, il: usize, from: NodeName, routing: &mut Routing) -> NodeName {
        let k = routing.n_expert_used;
        let [sum, clamped, norm] = [
            "ffn_moe_weights_sum",
            "ffn_moe_weights_sum_clamped",
            "ffn_moe_weights_norm",
        ]
        .map(|stem| NodeName::of(stem, il));
        let before = weights(from.reshaped(), routing);

        let start = self.recorder.start();
        self.sums.clear();
        if !self.is_done() {
            let rows = routing.weights.host().chunks_exact(k);
            self.sums.extend(rows.map(|row| row.iter().sum::<f32>()));
        }
        self.record(start, number::SUM_ROWS, sum, &[before]);

        let start = self.recorder.start();
        let sums = self.sums.iter_mut();
        sums.for_each(|sum| *sum = sum.max(MIN_WEIGHT_SUM));
        let source = small(sum, SUMS_BUFFER, &self.sums, 1, "f32");
        self.record(start, number::CLAMP, clamped, &[source]);

        let start = self.recorder.start();
        if !self.is_done() {
            let rows = routing.weights.host_mut().chunks_exact_mut(k);
            for (row, sum) in rows.zip(&self.sums) {
                row.iter_mut().for_each(|w| *w /= sum);
            }
        }
        let source = small(clamped, SUMS_BUFFER, &self.sums, 1, "f32");
        self.record(start, number::DIV, norm, &[before, source]);
        norm.reshaped()
    }

    /// Multiplies all weights by the factor of the model.
    fn scale_weights(
        &mut self,
        il: usize,
        from: NodeName,
        scale: f32,
        routing: &mut Routing,
    ) -> NodeName {
        let start = self.recorder.start();
        if !self.is_done() {
            let weights = routing.weights.host_mut();
            weights.iter_mut().for_each(|w| *w *= scale);
        }
        let name = NodeName::of("ffn_moe_weights_scaled", il);
        self.record(start, number::SCALE, name, &[weights(from, routing)]);
        name
    }
}

/// The `k` best of `row` at the beginning of `order`, best first, ties to the lower index.
fn best(row: &[f32], k: usize, order: &mut Vec<u32>) {
    order.clear();
    order.extend(0..row.len() as u32);
    let better = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
    if k < row.len() {
        order.select_nth_unstable_by(k - 1, better);
    }
    order[..k].sort_unstable_by(better);
}

/// Ids of the router's own small buffers, between those of the activations and the caches.
const GROUPS_BUFFER: u64 = (1 << 16) - 5;
const QUANTIZED_BUFFER: u64 = (1 << 16) - 6;
const IDS_BUFFER: u64 = (1 << 16) - 3;
const WEIGHTS_BUFFER: u64 = (1 << 16) - 2;
const SUMS_BUFFER: u64 = (1 << 16) - 1;

/// The chosen ids as a source.
pub(super) fn ids<'a>(il: usize, routing: &Routing) -> Source<'a> {
    let name = NodeName::of("ffn_moe_topk", il);
    chosen(name, IDS_BUFFER, &routing.ids, routing.n_expert_used, "i32")
}

/// The weights of the chosen as a source.
pub(super) fn weights<'a>(name: NodeName, routing: &Routing) -> Source<'a> {
    let k = routing.n_expert_used;
    chosen(name, WEIGHTS_BUFFER, &routing.weights, k, "f32")
}

/// Rows of `k` elements.
fn chosen<'a, T: Plain>(
    name: NodeName,
    buffer_id: u64,
    values: &Mirrored<T>,
    k: usize,
    dtype: &'static str,
) -> Source<'a> {
    Source::Buffer {
        name,
        suffix: "",
        buffer_id: twin_id(buffer_id, values),
        address: values.address(),
        size_bytes: (values.len() * size_of::<T>()) as u64,
        ne: [k as u64, (values.len() / k.max(1)) as u64],
        dtype,
    }
}

/// Rows of `width` elements.
fn small<'a, T>(
    name: NodeName,
    buffer_id: u64,
    values: &[T],
    width: usize,
    dtype: &'static str,
) -> Source<'a> {
    Source::Buffer {
        name,
        suffix: "",
        buffer_id,
        address: values.as_ptr() as u64,
        size_bytes: size_of_val(values) as u64,
        ne: [width as u64, (values.len() / width.max(1)) as u64],
        dtype,
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
