//! The router of a MoE layer: scores, top-k selection of experts, and expert weights.

mod steps;

use moe_engine::RouterOutput;
use moe_placement::perf::PerfMode;
use moe_trace::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::{Input, Inventory, id_at_home};
use crate::cuda::Device;
use crate::device_id::DeviceId;
use crate::hparams::{Gating, Groups};
use crate::mirrored::{Mirrored, Plain};
use crate::ops::{Ops, Scope};
use crate::recorder::{Routing, Source};
use crate::weights::{Linear, Vector};

/// The router of one layer.
pub struct RouterSpec<'a, 'g> {
    /// Weights of the scores `(n_embd, n_expert)`.
    pub scores: &'a Linear<'g>,
    /// Function from scores to probabilities.
    pub gating: Gating,
    /// Added to the probabilities before the top-k selection, not to the expert weights `(n_expert)`.
    pub selection_bias: Option<&'a Vector>,
    /// Expert groups, if the selection is group-limited.
    pub groups: Option<Groups>,
    /// Whether the weights of the selected experts are normalized to a sum of 1.
    pub norm_weights: bool,
    /// Factor on the expert weights.
    pub weights_scale: f32,
    /// Selected experts per token (top-k).
    pub n_expert_used: usize,
    /// Whether the CPU selects the experts, also if the scores are on a GPU. It then needs the input of the router, too.
    pub on_cpu: bool,
}

/// Buffers of a router, each `(token, n_expert)`.
pub struct RouterState {
    pub(crate) scores: Activation,
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
    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("router scores", &self.scores);
        inventory.activation("router probabilities", &self.probs);
        inventory.activation("router selection", &self.selection);
    }
}

impl Routing {
    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.mirrored(IDS_BUFFER, "selected experts", &self.ids);
        inventory.mirrored(
            WEIGHTS_BUFFER,
            "weights of the selected experts",
            &self.weights,
        );
    }
}

impl Ops<'_> {
    /// Adds the buffers of operations, other than those of their results, to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.vector(Input::Positions.buffer_id(), "positions", &self.positions);
        inventory.vector(GROUPS_BUFFER, "expert groups", &self.groups);
        inventory.vector(SUMS_BUFFER, "sums of weights", &self.sums);
        let factors = Input::Factors.buffer_id();
        inventory.mirrored(factors, "factors of tokens", &self.row_factors);
        self.low_rank.buffers(inventory);
        if let Some(cache) = &self.hot {
            cache.buffers(inventory);
        }
        inventory.vector(
            QUANTIZED_BUFFER,
            "quantized activations",
            self.quantized.room(),
        );
    }

    /// Computes the scores of the experts for each row of `src (token, n_embd)`.
    pub fn scores(
        &mut self,
        il: LayerId,
        spec: &RouterSpec,
        src: &mut Activation,
        state: &mut RouterState,
    ) {
        let biased = match spec.gating {
            Gating::SoftmaxOfSelected => "ffn_moe_probs", // the name in llama.cpp if the selection uses the scores
            _ => "ffn_moe_logits_biased",
        };
        let names = ["ffn_moe_logits", biased].map(|stem| NodeName::of(stem, il));
        self.linear(names, spec.scores, src, &mut state.scores);
        if spec.on_cpu {
            self.fetch_both(src, &mut state.scores);
        }
    }

    /// Selects experts by the scores of [`Ops::scores`]. Returns the name of the node with the expert weights.
    pub fn route(
        &mut self,
        il: LayerId,
        spec: &RouterSpec,
        state: &mut RouterState,
        routing: &mut Routing,
    ) -> NodeName {
        let name = |stem| NodeName::of(stem, il);
        let softmax_last = spec.gating == Gating::SoftmaxOfSelected;
        let scope = &mut self.select_on_gpu(spec, state, routing);
        self.check_finite(&state.scores);
        if !softmax_last {
            self.gate(scope, name("ffn_moe_probs"), spec.gating, state);
        }
        let probs = if softmax_last {
            &state.scores
        } else {
            &state.probs
        };
        let mut selected_by = match spec.gating {
            Gating::SigmoidOfSelected => &state.scores,
            _ => probs,
        };
        if spec.selection_bias.is_some() || spec.groups.is_some() {
            let selection = &mut state.selection;
            selection.shape(selected_by.name, selected_by.width, selected_by.rows);
            if !scope.is_done() {
                selection.data_mut().copy_from_slice(selected_by.data());
            }
            if let Some(bias) = spec.selection_bias {
                let name = name("ffn_moe_probs_biased");
                self.bias_selection(scope, name, bias, selected_by, selection);
            }
            if let Some(groups) = spec.groups {
                self.keep_best_groups(scope, il, groups, selection);
            }
            selected_by = selection;
        }
        self.select(scope, il, selected_by, spec.n_expert_used, routing);
        let mut from = self.expert_weights(scope, il, probs, routing);
        if softmax_last {
            from = self.soft_max_weights(scope, il, from, routing);
        }
        if spec.norm_weights {
            from = self.normalize_weights(scope, il, from, routing);
        }
        if spec.weights_scale != 1.0 {
            from = self.scale_weights(scope, il, from, spec.weights_scale, routing);
        }
        if let Some(mut observer) = self.observer.take() {
            self.fetch(&mut state.scores.values);
            self.routing_to_host(routing);
            observer(&RouterOutput {
                layer: il,
                positions: &self.positions,
                sequences: &self.sequences,
                logits: state.scores.data(),
                ids: routing.ids.host(),
                weights: routing.weights.host(),
                n_expert_used: routing.n_expert_used,
            });
            self.observer = Some(observer);
        }
        self.note_routing(il, routing);
        from
    }

    /// Computes all operations after the scores in one kernel, if the scores are on a GPU and the kernel supports the router.
    /// Returns the scope of these operations.
    fn select_on_gpu(
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
        let fits = !spec.on_cpu && Device::supports_router(n_expert);
        let home = scores.values.home();
        let device = if fits { home } else { DeviceId::Cpu };
        routing.copy = None;
        let is_recorded = self.recorder.is_on() || self.batch_observer.is_on();
        let is_counted = self
            .hot
            .as_ref()
            .is_some_and(|cache| cache.mode() != PerfMode::Off);
        let done = self.on(&mut scope, device, |gpu| {
            gpu.route(spec, scores, routing, is_recorded || is_counted)
        });
        if done {
            self.download(device, routing);
            self.state_shapes(state);
        } else {
            self.fetch(&mut state.scores.values);
        }
        scope
    }

    /// Starts the D2H copy of routing decisions that only a GPU has, if they are recorded or observed, and not in the log.
    fn download(&mut self, gpu: DeviceId, routing: &mut Routing) {
        if let Some(gpu) = self.devices.gpu_mut(gpu)
            && (self.recorder.is_on() || self.batch_observer.is_on())
            && routing.copy.is_none()
            && let Err(error) = gpu.begin_download(routing)
        {
            // Without the asynchronous copy, fetch and wait.
            gpu.fallbacks.note(&error);
            self.routing_to_host(routing);
        }
    }

    /// Sets the names and shapes of buffers that the kernel of the complete router does not write.
    fn state_shapes(&self, state: &mut RouterState) {
        let (name, width, rows) = (state.scores.name, state.scores.width, state.scores.rows);
        state.probs.shape(name, width, rows);
        state.selection.shape(name, width, rows);
    }

    /// Copies the routing decisions to the CPU if only a GPU has them.
    pub(super) fn routing_to_host(&mut self, routing: &mut Routing) {
        self.fetch(&mut routing.ids);
        self.fetch(&mut routing.weights);
    }
}

/// Ids of the router's buffers, between the ids of the activations and the caches.
const GROUPS_BUFFER: u64 = (1 << 16) - 5;
const QUANTIZED_BUFFER: u64 = (1 << 16) - 6;
/// Factors of experts, which have no memory.
pub(super) const SCALES_BUFFER: u64 = (1 << 16) - 7;
const IDS_BUFFER: u64 = (1 << 16) - 3;
const WEIGHTS_BUFFER: u64 = (1 << 16) - 2;
const SUMS_BUFFER: u64 = (1 << 16) - 1;

/// The ids of the selected experts as a source.
pub(super) fn ids<'a>(il: LayerId, routing: &Routing) -> Source<'a> {
    let name = NodeName::of("ffn_moe_topk", il);
    per_expert(name, IDS_BUFFER, &routing.ids, routing.n_expert_used, "i32")
}

/// The weights of the selected experts as a source.
pub(super) fn weights<'a>(name: NodeName, routing: &Routing) -> Source<'a> {
    let k = routing.n_expert_used;
    per_expert(name, WEIGHTS_BUFFER, &routing.weights, k, "f32")
}

/// Values `(token, k)` as a source.
fn per_expert<'a, T: Plain>(
    name: NodeName,
    buffer_id: u64,
    values: &Mirrored<T>,
    k: usize,
    dtype: &'static str,
) -> Source<'a> {
    Source::Buffer {
        name,
        suffix: "",
        buffer_id: id_at_home(buffer_id, values),
        address: values.address(),
        size_bytes: (values.len() * size_of::<T>()) as u64,
        ne: [k as u64, (values.len() / k.max(1)) as u64],
        dtype,
    }
}

/// Values `(row, width)` in CPU memory as a source.
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
