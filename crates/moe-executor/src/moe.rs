//! The MoE layer: router, selected experts, their weighted sum, shared expert. [`MoeSpec`] describes the differences
//! between architectures.

mod latent;
mod state;

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::device_id::DeviceId;
use crate::error::Result;
use crate::ffn::{FFN_OPS, Ffn, LIMIT_OPS, ungated_ffn_ops};
use crate::hparams::{Gating, Groups, HParams, Keys, MAX_WIDTH};
use crate::ops::{
    At, ExpertIo, ExpertNodes, ExpertScales, Glu, MergeNames, Ops, Projection, RouterSpec,
    SwigluLimit, Unary, UngatedNodes,
};
use crate::recorder::{LaneCounts, Routing};
use crate::weights::{Bias, Linear, Loader, Matrix, Vector};

use latent::Latent;
pub use state::MoeState;

/// The MoE layers of an architecture.
#[derive(Clone, Copy)]
pub struct MoeSpec {
    /// Function from router scores to probabilities.
    pub gating: Gating,
    /// Whether a bias is added to the probabilities before the top-k selection.
    pub selection_bias: bool,
    /// Whether the weights of the selected experts are normalized to a sum of 1.
    pub norm_weights: bool,
    /// Factor on the expert weights.
    pub weights_scale: f32,
    /// Activation of an expert with a gate.
    pub glu: Glu,
    /// Activation of routed and shared experts without a gate; `None` if they have a gate.
    pub ungated: Option<Unary>,
    /// Width of the input and the output of the routed experts if a matrix projects the width of the residual stream to it, and
    /// another one back.
    pub latent: Option<usize>,
    /// Whether router and experts have biases.
    pub biases: bool,
    /// Whether a file may have a factor for the output of each expert (`ffn_down_exps.scale`).
    pub expert_scales: bool,
    /// Name of the weighted sum of the experts.
    pub sum: &'static str,
    /// Whether the router reads the input of the layer, before its norm.
    pub routes_ahead: bool,
    /// Whether the weights of the experts are applied to their inputs instead of their outputs.
    pub weights_first: bool,
    /// The expert that processes all tokens, if the architecture has one.
    pub shared: Option<SharedExpert>,
    /// Name of the sum of the selected experts and the shared expert.
    pub shared_sum: &'static str,
    /// Factor on this sum.
    pub shared_scale: Option<f32>,
}

/// An expert that processes all tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedExpert {
    /// Hidden width.
    pub width: SharedWidth,
    /// Whether its output is multiplied by the sigmoid of a score from `ffn_gate_inp_shexp`.
    pub gated: bool,
    /// Names of the score, of its sigmoid and of the product, if the sigmoid is one node. Otherwise llama.cpp computes it as
    /// `silu(x) / x`.
    pub sigmoid: Option<[&'static str; 3]>,
    /// Name of its down product.
    pub node: &'static str,
}

impl SharedExpert {
    /// A shared expert of the width `expert_shared_feed_forward_length`; `None` if the key is missing or 0.
    pub(crate) fn of_key(keys: &Keys) -> Result<Option<SharedExpert>> {
        const KEY: &str = "expert_shared_feed_forward_length";
        if !keys.is_set(KEY)? {
            return Ok(None);
        }
        let width = SharedWidth::Own(keys.count(KEY, MAX_WIDTH)?);
        Ok(Some(SharedExpert::of_width(width)))
    }

    /// A shared expert that is `expert_shared_count` times as wide as a routed expert of the layer.
    pub(crate) fn counted(keys: &Keys, hp: &HParams) -> Result<SharedExpert> {
        let widest = hp.n_ff_exp_by_layer.iter().max().copied().unwrap_or(0);
        let n = keys.count("expert_shared_count", MAX_WIDTH / widest.max(1))?;
        Ok(SharedExpert::of_width(SharedWidth::Experts(n)))
    }

    /// A shared expert without a score.
    pub const fn of_width(width: SharedWidth) -> SharedExpert {
        SharedExpert {
            width,
            gated: false,
            sigmoid: None,
            node: "ffn_shexp",
        }
    }
}

/// Hidden width of a shared expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SharedWidth {
    /// The same number of elements in all layers.
    Own(usize),
    /// A multiple of the width of the layer's routed experts.
    Experts(usize),
}

impl MoeSpec {
    /// Softmax over all experts whose probabilities are the expert weights; SwiGLU; no biases, no shared expert.
    pub const PLAIN: MoeSpec = MoeSpec {
        gating: Gating::Softmax,
        selection_bias: false,
        norm_weights: false,
        weights_scale: 1.0,
        glu: Glu::Swiglu,
        ungated: None,
        latent: None,
        biases: false,
        expert_scales: false,
        sum: "ffn_moe_out",
        routes_ahead: false,
        weights_first: false,
        shared: None,
        shared_sum: "ffn_out",
        shared_scale: None,
    };

    /// Routed experts of an architecture whose header contains `expert_weights_norm` and `expert_weights_scale`.
    pub(crate) fn from_keys(
        keys: &Keys,
        gating: Gating,
        selection_bias: bool,
        shared: Option<SharedExpert>,
    ) -> Result<MoeSpec> {
        Ok(MoeSpec {
            gating,
            selection_bias,
            norm_weights: keys.bool_or("expert_weights_norm", false)?,
            weights_scale: keys.weights_scale()?,
            shared,
            ..MoeSpec::PLAIN
        })
    }

    /// For a layer with `n_expert_used` selected experts: the number of operations that write one record per pass, and
    /// the number of operations that write one record per token.
    pub fn ops(&self, hp: &HParams, n_expert_used: usize) -> (usize, usize) {
        let router = 1
            + usize::from(self.biases)
            + 1 // softmax or sigmoid
            + usize::from(self.selection_bias)
            + 7 * usize::from(hp.expert_groups.is_some())
            + 2 // argsort, weights
            + 3 * usize::from(self.norm_weights)
            + usize::from(self.weights_scale != 1.0);
        let repeat = usize::from(self.weights_first);
        let merge = repeat + 1 + (n_expert_used.max(2) - 1);
        let (activation, projections, ffn) = match self.ungated {
            None => (1, 3, FFN_OPS),
            Some(unary) => (unary.ops(), 2, ungated_ffn_ops(unary)),
        };
        let latent = 2 * usize::from(self.latent.is_some());
        let shared = match self.shared {
            Some(SharedExpert {
                gated: true,
                sigmoid: Some(_),
                ..
            }) => ffn + 4,
            Some(SharedExpert { gated: true, .. }) => ffn + 5,
            Some(SharedExpert { gated: false, .. }) => ffn + 1,
            None => 0,
        };
        let per_token = if self.biases {
            2 * projections
        } else {
            projections
        };
        (router + latent + activation + merge + shared, per_token)
    }
}

/// Weights of one MoE layer.
pub struct MoeLayer<'g> {
    il: LayerId,
    spec: MoeSpec,
    groups: Option<Groups>,
    n_expert_used: usize,
    /// `(n_embd, n_expert)`
    router: Linear<'g>,
    /// `(n_expert)`
    selection_bias: Option<Vector>,
    latent: Option<Latent<'g>>,
    gate: Gate<'g>,
    /// `(n_in, n_ff_exp, n_expert)`: `n_in` is `n_embd` or the latent width.
    up: Linear<'g>,
    /// `(n_ff_exp, n_in, n_expert)`
    down: Linear<'g>,
    /// Factors of the output of each expert `(n_expert)`.
    scales: Option<Vector>,
    /// Limit of the activation of the experts.
    limit: Option<f32>,
    shared: Option<Shared<'g>>,
}

/// The gates of the routed experts.
enum Gate<'g> {
    /// `(n_in, n_ff_exp, n_expert)`
    Glu(Box<Linear<'g>>),
    /// The activation of experts without a gate.
    None(Unary),
}

/// Weights of a shared expert.
struct Shared<'g> {
    node: &'static str,
    sigmoid: Option<[&'static str; 3]>,
    ffn: Ffn<'g>,
    /// `(n_embd, 1)`
    gate: Option<Matrix<'g>>,
}

impl<'g> MoeLayer<'g> {
    pub(crate) fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        spec: &MoeSpec,
    ) -> Result<MoeLayer<'g>> {
        let (n_embd, n_ff, n_expert) = (hp.n_embd, hp.n_ff_exp_by_layer[il.index()], hp.n_expert);
        let n_in = spec.latent.unwrap_or(n_embd);
        let bias = if spec.biases {
            Bias::Required
        } else {
            Bias::None
        };
        let linear = |part: &str, ne| loader.linear(&format!("blk.{il}.{part}"), ne, bias);
        let selection_bias = spec
            .selection_bias
            .then(|| loader.vector(&format!("blk.{il}.exp_probs_b.bias"), n_expert));
        let limits = hp.swiglu_limits[il.index()];
        let shared = spec.shared.map(|shared| {
            let name = format!("blk.{il}.ffn_gate_inp_shexp.weight");
            let gate = shared.gated.then(|| loader.matrix(&name, n_embd, 1));
            let width = match shared.width {
                SharedWidth::Own(width) => width,
                SharedWidth::Experts(n) => n * n_ff,
            };
            let ffn = match spec.ungated {
                None => Ffn::load(loader, il, "_shexp", n_embd, width)?,
                Some(unary) => Ffn::load_ungated(loader, il, "_shexp", [n_embd, width], unary)?,
            };
            Ok::<_, crate::Error>(Shared {
                node: shared.node,
                sigmoid: shared.sigmoid,
                ffn: ffn.with_limit(limits.dense),
                gate: gate.transpose()?,
            })
        });
        let latent = spec.latent.map(|n| Latent::load(loader, il, n_embd, n));
        let scales = format!("blk.{il}.ffn_down_exps.scale");
        let has_scales = spec.expert_scales && loader.has(&scales);
        let scales = has_scales.then(|| loader.vector(&scales, n_expert));
        let both = format!("blk.{il}.ffn_gate_up_exps.weight");
        let shape = [n_in, n_ff, n_expert];
        let (gate, up) = match spec.ungated {
            Some(unary) => (Gate::None(unary), linear("ffn_up_exps", shape)?),
            None if loader.has(&both) && !spec.biases => {
                let halves = loader.halves(&both, n_in, n_ff, n_expert)?;
                let [gate, up] = halves.map(|weights| Linear {
                    weights,
                    bias: None,
                });
                (Gate::Glu(Box::new(gate)), up)
            }
            None => {
                let gate = linear("ffn_gate_exps", shape)?;
                (Gate::Glu(Box::new(gate)), linear("ffn_up_exps", shape)?)
            }
        };
        Ok(MoeLayer {
            il,
            spec: *spec,
            groups: hp.expert_groups,
            n_expert_used: hp.n_expert_used_by_layer[il.index()],
            router: linear("ffn_gate_inp", [n_embd, n_expert, 1])?,
            selection_bias: selection_bias.transpose()?,
            latent: latent.transpose()?,
            gate,
            up,
            down: linear("ffn_down_exps", [n_ff, n_in, n_expert])?,
            scales: scales.transpose()?,
            limit: limits.experts,
            shared: shared.transpose()?,
        })
    }

    /// Whether gate and up are in one tensor.
    fn is_fused(&self) -> bool {
        matches!(&self.gate, Gate::Glu(gate) if gate.weights.shares_tensor(&self.up.weights))
    }

    /// The number of operations that write one record per pass, and the number of those that write one record per token.
    pub(crate) fn ops(&self, hp: &HParams) -> (usize, usize) {
        let (pass, token) = self.spec.ops(hp, self.n_expert_used);
        let scales = if self.scales.is_some() { 3 } else { 0 };
        let shared = self.shared.as_ref();
        let shared = shared.map_or(0, |shared| shared.ffn.limit_ops());
        let limit = self.limit.map_or(0, |_| LIMIT_OPS);
        let factor = self.shared.as_ref().and(self.spec.shared_scale);
        let pass = pass + scales + shared + limit + usize::from(factor.is_some());
        (pass, token - usize::from(self.is_fused()))
    }

    /// `out = Σ weight · expert(x) + shared expert(x)` over the selected experts, for each row of `x (token, n_embd)`.
    pub fn forward(
        &self,
        ops: &mut Ops,
        device: DeviceId,
        s: &mut MoeState,
        x: &mut Activation,
        out: &mut Activation,
    ) {
        let router = self.router(ops, x.rows);
        ops.begin_call(device);
        ops.scores(self.il, &router, x, &mut s.router);
        let weights = ops.route(self.il, &router, &mut s.router, &mut s.routing);
        ops.end_routing(device);
        self.experts(ops, device, s, weights, x, out);
        self.finish(ops, device, s, x, out);
    }

    /// Computes the scores of a router that reads another input than the experts, `x (token, n_embd)`.
    pub(crate) fn scores(&self, ops: &mut Ops, s: &mut MoeState, x: &mut Activation) {
        let router = self.router(ops, x.rows);
        ops.scores(self.il, &router, x, &mut s.router);
    }

    /// Selects experts by the scores of [`MoeLayer::scores`]. Returns the name of the node with the expert weights.
    pub(crate) fn route(&self, ops: &mut Ops, s: &mut MoeState) -> NodeName {
        let router = self.router(ops, s.router.scores.rows);
        ops.route(self.il, &router, &mut s.router, &mut s.routing)
    }

    /// The experts that [`MoeLayer::route`] selected; `weights` is the name of its result.
    pub(crate) fn forward_selected(
        &self,
        ops: &mut Ops,
        device: DeviceId,
        s: &mut MoeState,
        weights: NodeName,
        [x, out]: [&mut Activation; 2],
    ) {
        ops.begin_call(device);
        ops.end_routing(device);
        ops.wait_for_input(x);
        self.experts(ops, device, s, weights, x, out);
        self.finish(ops, device, s, x, out);
    }

    fn router(&self, ops: &Ops, tokens: usize) -> RouterSpec<'_, 'g> {
        RouterSpec {
            scores: &self.router,
            gating: self.spec.gating,
            selection_bias: self.selection_bias.as_ref(),
            groups: self.groups,
            norm_weights: self.spec.norm_weights,
            weights_scale: self.spec.weights_scale,
            n_expert_used: self.n_expert_used,
            on_cpu: ops.routes_on_cpu(self.il, self.projections(), tokens),
        }
    }

    /// Like [`MoeLayer::forward`], with the routing decisions of `routing` instead of the router's. Returns the number of
    /// down products per lane.
    pub(crate) fn forward_routed(
        &self,
        ops: &mut Ops,
        device: DeviceId,
        s: &mut MoeState,
        routing: &mut Routing,
        x: &mut Activation,
        out: &mut Activation,
    ) -> LaneCounts {
        let weights = NodeName::of("ffn_moe_weights", self.il);
        ops.begin_call(device);
        std::mem::swap(&mut s.routing, routing);
        let lanes = self.experts(ops, device, s, weights, x, out);
        self.finish(ops, device, s, x, out);
        std::mem::swap(&mut s.routing, routing);
        lanes
    }

    /// Gate, up and down of the routed experts; `None` if they have no gate.
    pub(crate) fn projections(&self) -> Option<[&Linear<'g>; 3]> {
        match &self.gate {
            Gate::Glu(gate) => Some([gate.as_ref(), &self.up, &self.down]),
            Gate::None(_) => None,
        }
    }

    /// Number of experts.
    pub(crate) fn n_expert(&self) -> usize {
        self.up.weights.n_expert
    }

    /// Bytes of the shared expert's weights; 0 without one.
    pub(crate) fn shared_bytes(&self) -> u64 {
        self.shared.as_ref().map_or(0, |shared| {
            let gate = shared.gate.as_ref().map_or(0, |g| g.place.size_bytes);
            shared.ffn.size_bytes() + gate
        })
    }

    /// The operations of the selected experts.
    fn experts(
        &self,
        ops: &mut Ops,
        device: DeviceId,
        s: &mut MoeState,
        weights: NodeName,
        x: &mut Activation,
        out: &mut Activation,
    ) -> LaneCounts {
        let il = self.il;
        let name = |stem| NodeName::of(stem, il);
        let projection = |names: [&'static str; 2], linear| Projection {
            il,
            names: names.map(name),
            linear,
            scales: None,
        };
        let at = At { il, device };
        let merge = MergeNames {
            weights,
            weights_first: self.spec.weights_first,
            sum: name(self.spec.sum),
        };
        let [gate_name, up_name] = if self.is_fused() {
            ["ffn_moe_gate_up"; 2]
        } else {
            ["ffn_moe_gate", "ffn_moe_up"]
        };
        let up = projection([up_name, "ffn_moe_up_biased"], &self.up);
        let down = projection(["ffn_moe_down", "ffn_moe_down_biased"], &self.down);
        let scales = self.scales.as_ref().map(|factors| ExpertScales {
            il,
            factors,
            names: [
                "ffn_moe_down_scales",
                "ffn_moe_down_scale",
                "ffn_moe_down_scaled",
            ]
            .map(name),
        });
        let down = Projection { scales, ..down };
        let (x, dst) = match (&self.latent, &self.shared) {
            (Some(latent), _) => {
                latent.project(ops, x, &mut s.latent);
                s.latent.io()
            }
            (None, Some(_)) => (x, &mut s.shared.routed),
            (None, None) => (x, out),
        };
        let io = ExpertIo {
            x,
            weighted: &mut s.weighted,
            routing: &mut s.routing,
            buffers: [&mut s.gate, &mut s.up, &mut s.down],
            dst,
        };
        let gate = match &self.gate {
            Gate::Glu(gate) => gate.as_ref(),
            Gate::None(unary) => {
                let activated = match unary {
                    Unary::SquaredRelu => ["ffn_moe_relu", "ffn_moe_relu_sqr"],
                };
                let nodes = UngatedNodes {
                    at,
                    up,
                    down,
                    unary: *unary,
                    activated: activated.map(name),
                    merge,
                };
                return ops.ungated_experts(&nodes, io);
            }
        };
        let gate = projection([gate_name, "ffn_moe_gate_biased"], gate);
        let activated = match self.spec.glu {
            Glu::Swiglu if self.limit.is_none() => "ffn_moe_swiglu",
            Glu::Swiglu | Glu::SwigluLimited(_) => "ffn_moe_swiglu_limited",
            Glu::SwigluOai => "ffn_moe_swiglu_oai",
            Glu::Reglu => "ffn_moe_reglu",
            Glu::Geglu => "ffn_moe_geglu",
        };
        let nodes = ExpertNodes {
            at,
            projections: [gate, up, down],
            activated: name(activated),
            glu: self.spec.glu,
            limit: self.limit.map(|limit| SwigluLimit {
                limit,
                names: ["ffn_moe_silu", "ffn_moe_silu_clamped", "ffn_moe_up_clamped"].map(name),
            }),
            merge,
        };
        ops.experts(&nodes, io)
    }

    /// The operations after the selected experts: the projection to the width of the residual stream, and the shared expert.
    fn finish(
        &self,
        ops: &mut Ops,
        device: DeviceId,
        s: &mut MoeState,
        x: &mut Activation,
        out: &mut Activation,
    ) {
        let name = |stem| NodeName::of(stem, self.il);
        if let Some(latent) = &self.latent {
            let dst = match &self.shared {
                Some(_) => &mut s.shared.routed,
                None => &mut *out,
            };
            latent.project_back(ops, &mut s.latent, dst);
        }
        let Some(shared) = &self.shared else {
            return;
        };
        let (routed, own) = (&mut s.shared.routed, &mut s.shared.out);
        let node = name(shared.node);
        shared.ffn.forward(ops, &mut s.ffn, node, x, own);
        if let Some(gate) = &shared.gate {
            let (score, weight) = (&mut s.shared.score, &mut s.shared.weight);
            if let Some([product, sigmoid, gated]) = shared.sigmoid {
                ops.mul_mat(name(product), gate, x, score);
                ops.multiply_by_sigmoid([sigmoid, gated].map(name), score, own);
            } else {
                ops.mul_mat(name("ffn_shexp_gate_inp"), gate, x, score);
                let names = ["ffn_shexp_gate_silu", "ffn_shexp_gate", "ffn_shexp_out"];
                ops.scale_by_sigmoid(device, names.map(name), score, weight, own);
            }
        }
        let sum = name(self.spec.shared_sum);
        match self.spec.shared_scale {
            Some(factor) => {
                ops.add(device, name("ffn_out_sum"), routed, own, out);
                ops.scale(sum, factor, out);
            }
            None => ops.add(device, sum, routed, own, out),
        }
    }
}
