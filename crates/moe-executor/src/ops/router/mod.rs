//! The router of a MoE layer: scores, choice of the best experts, and their weights.

mod steps;

use moe_engine::Routed;
use moe_trace::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::{Input, Inventory, twin_id};
use crate::cuda::Device;
use crate::mirrored::{Mirrored, Plain};
use crate::ops::{Ops, Scope};
use crate::placement::DeviceId;
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
        let biased = if of_chosen {
            "ffn_moe_probs" // llama.cpp's name for scores that are taken as they are
        } else {
            "ffn_moe_logits_biased"
        };
        let names = ["ffn_moe_logits", biased].map(name);
        self.linear(names, spec.scores, src, &mut state.scores);
        let scope = &mut self.choose_on_gpu(spec, state, routing);
        self.check_finite(&state.scores);
        if !of_chosen {
            self.gate(scope, name("ffn_moe_probs"), spec.gating, state);
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
            if !scope.is_done() {
                selection.data_mut().copy_from_slice(probs.data());
            }
            if let Some(bias) = spec.selection_bias {
                let name = name("ffn_moe_probs_biased");
                self.bias_selection(scope, name, bias, probs, selection);
            }
            if let Some(groups) = spec.groups {
                self.keep_best_groups(scope, il, groups, selection);
            }
            chosen_by = selection;
        }
        self.choose(scope, il, chosen_by, spec.n_expert_used, routing);
        let mut from = self.weigh(scope, il, probs, routing);
        if of_chosen {
            from = self.soft_max_chosen(scope, il, from, routing);
        }
        if spec.norm_weights {
            from = self.normalise(scope, il, from, routing);
        }
        if spec.weights_scale != 1.0 {
            from = self.scale_weights(scope, il, from, spec.weights_scale, routing);
        }
        if let Some(mut observer) = self.observer.take() {
            self.fetch(&mut state.scores.values);
            self.routing_to_host(routing);
            observer(&Routed {
                layer: LayerId(il as u16),
                positions: &self.positions,
                logits: state.scores.data(),
                ids: routing.ids.host(),
                weights: routing.weights.host(),
                n_expert_used: routing.n_expert_used,
            });
            self.observer = Some(observer);
        }
        from
    }

    /// Does all that follows the scores in one kernel, if they are on a GPU. Returns the scope of the operations that this is.
    fn choose_on_gpu(
        &mut self,
        spec: &RouterSpec,
        state: &mut RouterState,
        routing: &mut Routing,
    ) -> Scope {
        let scores = &mut state.scores;
        let (tokens, n_expert, k) = (scores.rows, scores.width, spec.n_expert_used);
        routing.n_expert_used = k;
        routing.ids.resize(tokens * k);
        routing.weights.resize(tokens * k);
        let mut scope = self.start();
        let fits = Device::supports_router(spec, n_expert);
        let home = scores.values.home();
        let device = if fits { home } else { DeviceId::Cpu };
        let done = self.on(&mut scope, device, |gpu| gpu.route(spec, scores, routing));
        routing.copy = None;
        if done {
            self.download(device, routing);
            self.state_shapes(state);
        } else {
            self.fetch(&mut state.scores.values);
        }
        scope
    }

    /// Begins to copy a choice that only a GPU has, if it is to be recorded.
    fn download(&mut self, gpu: DeviceId, routing: &mut Routing) {
        if let Some(gpu) = self.devices.gpu_mut(gpu)
            && self.recorder.is_on()
            && let Err(error) = gpu.begin_download(routing)
        {
            // Recording then waits for it.
            gpu.fallbacks.note(&error);
            self.routing_to_host(routing);
        }
    }

    /// Names and shapes that a kernel for the whole router leaves out.
    fn state_shapes(&self, state: &mut RouterState) {
        let (name, width, rows) = (state.scores.name, state.scores.width, state.scores.rows);
        state.probs.shape(name, width, rows);
        state.selection.shape(name, width, rows);
    }

    /// Fetches the choice if only a GPU has it.
    pub(super) fn routing_to_host(&mut self, routing: &mut Routing) {
        self.fetch(&mut routing.ids);
        self.fetch(&mut routing.weights);
    }
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
