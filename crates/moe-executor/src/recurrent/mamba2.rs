//! A Mamba-2 layer (Dao and Gu, "Transformers are SSMs", 2024): a convolution over the tokens, a scan that updates a state of each
//! head, and a gated norm.

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::buffers::Inventory;
use crate::cpu::state_space::SsmHeads;
use crate::error::Result;
use crate::hparams::{HParams, Keys, MAX_WIDTH, StateShape};
use crate::kv_cache::KvCache;
use crate::norm::Norm;
use crate::ops::{At, Convolution, Glu, Ops};
use crate::weights::{Loader, Matrix, Vector};

/// The Mamba-2 layers of an architecture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mamba2Spec {
    heads: SsmHeads,
    /// Length of the kernels of the convolution.
    n_kernel: usize,
}

impl Mamba2Spec {
    /// Reads the keys `ssm.*`.
    ///
    /// # Errors
    /// A key is missing, or its value is not supported.
    pub(crate) fn read(keys: &Keys) -> Result<Mamba2Spec> {
        const KERNEL: &str = "ssm.conv_kernel";
        const WIDTH: &str = "ssm.inner_size";
        const HEADS: &str = "ssm.time_step_rank";
        const GROUPS: &str = "ssm.group_count";
        let n_kernel = keys.count(KERNEL, 1 << 10)?;
        if n_kernel == 1 {
            return Err(keys.bad(KERNEL, n_kernel, "it must be at least 2"));
        }
        let width = keys.count(WIDTH, MAX_WIDTH)?;
        let n = keys.count(HEADS, MAX_WIDTH)?;
        let n_group = keys.count(GROUPS, n)?;
        if !width.is_multiple_of(n) {
            let reason = format!("it must be a multiple of the {n} heads (`{HEADS}`)");
            return Err(keys.bad(WIDTH, width, &reason));
        }
        if !n.is_multiple_of(n_group) {
            let reason = format!("it must divide the {n} heads (`{HEADS}`)");
            return Err(keys.bad(GROUPS, n_group, &reason));
        }
        Ok(Mamba2Spec {
            heads: SsmHeads {
                n,
                dim: width / n,
                n_group,
                n_state: keys.count("ssm.state_size", MAX_WIDTH)?,
            },
            n_kernel,
        })
    }

    /// Elements of all heads of a token (`ssm.inner_size`).
    pub(crate) fn width(&self) -> usize {
        self.heads.width()
    }

    /// Sizes of the states of a layer.
    pub(crate) fn state(&self) -> StateShape {
        StateShape {
            channels: self.heads.channels(),
            n_past: self.n_kernel - 1,
            state: self.heads.width().saturating_mul(self.heads.n_state),
        }
    }

    /// Elements of the input product: gates, channels of the convolution, and a step size for each head.
    fn projected(&self) -> usize {
        self.heads.width() + self.heads.channels() + self.heads.n
    }

    /// Names of the buffers of a pass over `tokens` tokens, and their number of values.
    pub(super) fn buffers(&self, n_embd: usize, tokens: u64) -> Vec<(&'static str, u64)> {
        let values = |width: usize| tokens.saturating_mul(width as u64);
        let (width, channels) = (self.heads.width(), self.heads.channels());
        vec![
            ("state-space input", values(n_embd)),
            ("state-space projections", values(self.projected())),
            ("state-space convolution input", values(channels)),
            ("state-space convolution", values(channels)),
            ("state-space step sizes", values(self.heads.n)),
            ("state-space scan", values(width)),
            ("state-space skip connection", values(width)),
            ("state-space gates", values(width)),
        ]
    }
}

/// Weights of a layer.
pub struct Mamba2<'g> {
    il: LayerId,
    heads: SsmHeads,
    /// `(n_embd)`
    norm: Norm,
    /// Product of gates, `x`, `B`, `C` and step sizes `(n_embd, width + channels + n_head)`.
    input: Matrix<'g>,
    /// Kernel of each channel `(n, channels)`, for the oldest input first.
    kernel: Vector,
    /// `(channels)`
    kernel_bias: Vector,
    /// Bias of the step sizes `(n_head)`.
    step_bias: Vector,
    /// Decay of each head, negative `(n_head)`.
    decay: Vector,
    /// Factor of each head on the skip connection `(n_head)`.
    skip: Vector,
    /// Norm of the gated output in each group `(n_group, width / n_group)`.
    output_norm: Norm,
    /// `(width, n_embd)`
    output: Matrix<'g>,
}

/// Buffers of the layers.
pub struct Mamba2State {
    /// Normed input `(token, n_embd)`.
    normed: Activation,
    /// Input product `(token, width + channels + n_head)`.
    projected: Activation,
    /// Input of the convolution `(token, channels)`.
    input: Activation,
    /// Output of the convolution: `x`, `B` and `C (token, channels)`.
    convolved: Activation,
    /// Step sizes `(token, n_head)`.
    steps: Activation,
    /// Output of the scan `(token, width)`.
    scanned: Activation,
    /// `x` multiplied by the factors of the skip connection, then the normed output `(token, width)`.
    skip: Activation,
    /// Gates, then the gated output `(token, width)`.
    gates: Activation,
}

impl Mamba2State {
    /// Buffers whose ids start at `first_id`.
    pub fn new(first_id: u64) -> Mamba2State {
        let buffer = |i| Activation::new(first_id + i);
        Mamba2State {
            normed: buffer(0),
            projected: buffer(1),
            input: buffer(2),
            convolved: buffer(3),
            steps: buffer(4),
            scanned: buffer(5),
            skip: buffer(6),
            gates: buffer(7),
        }
    }

    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("state-space input", &self.normed);
        inventory.activation("state-space projections", &self.projected);
        inventory.activation("state-space convolution input", &self.input);
        inventory.activation("state-space convolution", &self.convolved);
        inventory.activation("state-space step sizes", &self.steps);
        inventory.activation("state-space scan", &self.scanned);
        inventory.activation("state-space skip connection", &self.skip);
        inventory.activation("state-space gates", &self.gates);
    }
}

impl<'g> Mamba2<'g> {
    pub(crate) fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        spec: &Mamba2Spec,
    ) -> Result<Mamba2<'g>> {
        let heads = spec.heads;
        let (n_embd, width, channels) = (hp.n_embd, heads.width(), heads.channels());
        let name = |part: &str| format!("blk.{il}.{part}");
        let per_head = |part: &str| loader.vectors(&name(part), 1, heads.n);
        let of_group = width / heads.n_group;
        let output_norm = loader.vectors(&name("ssm_norm.weight"), of_group, heads.n_group);
        Ok(Mamba2 {
            il,
            heads,
            norm: Norm::load(loader, hp, &name("attn_norm"), n_embd, hp.norm_bias)?,
            input: loader.matrix(&name("ssm_in.weight"), n_embd, spec.projected())?,
            kernel: loader.kernels(&name("ssm_conv1d.weight"), spec.n_kernel, channels)?,
            kernel_bias: loader.vector(&name("ssm_conv1d.bias"), channels)?,
            step_bias: loader.vector(&name("ssm_dt.bias"), heads.n)?,
            decay: per_head("ssm_a")?,
            skip: per_head("ssm_d")?,
            output_norm: Norm {
                kind: hp.norm,
                eps: hp.norm_eps,
                n: of_group,
                weight: Some(output_norm?),
                bias: None,
            },
            output: loader.matrix(&name("ssm_out.weight"), width, n_embd)?,
        })
    }

    /// Operations of the layer. Each writes one record per pass.
    pub(crate) fn ops(&self) -> usize {
        // Each with a bias; the convolution also with an activation.
        let (convolution, steps) = (3, 2);
        // The skip connection has a product and a sum.
        let (products, scan, skip, gates) = (2, 1, 2, 2);
        let norms = self.norm.ops() + self.output_norm.ops();
        norms + products + convolution + steps + scan + skip + gates
    }

    /// Computes the scan for each row of `x (token, n_embd)`. Updates the states in the cache.
    pub fn scan(
        &self,
        ops: &mut Ops,
        at: At,
        s: &mut Mamba2State,
        x: &mut Activation,
        cache: &mut KvCache,
    ) {
        let (il, heads) = (self.il, self.heads);
        let name = |stem| NodeName::of(stem, il);
        let norm = ["norm", "attn_norm"].map(name);
        ops.norm(at.device, norm, x, &self.norm, &mut s.normed);
        ops.mul_mat(name("ssm_in"), &self.input, &mut s.normed, &mut s.projected);
        let (from, to) = (heads.width(), heads.width() + heads.channels());
        let (projected, input) = (&mut s.projected, &mut s.input);
        ops.columns(name("ssm_in"), from..to, projected, input);
        let convolution = Convolution {
            name: name("ssm_conv"),
            kernel: &self.kernel,
            bias: Some((&self.kernel_bias, name("ssm_conv_biased"))),
            silu: Some(name("ssm_conv_silu")),
        };
        ops.convolve(il, &convolution, input, cache, &mut s.convolved);
        let steps = &mut s.steps;
        ops.copy_columns(name("ssm_dt"), to..to + heads.n, projected, steps);
        ops.add_bias(name("ssm_dt_biased"), &self.step_bias, steps);
        ops.ssm_scan(
            (il, name("ssm_scan")),
            heads,
            &self.decay,
            [&mut s.convolved, &mut s.steps],
            cache,
            &mut s.scanned,
        );
    }

    /// `out = output product of the gated and normed scan`, after [`Mamba2::scan`]; `out (token, n_embd)`.
    pub fn output(&self, ops: &mut Ops, s: &mut Mamba2State, out: &mut Activation) {
        let name = |stem| NodeName::of(stem, self.il);
        let heads = self.heads;
        let (projected, gates) = (&mut s.projected, &mut s.gates);
        ops.copy_columns(name("ssm_gates"), 0..heads.width(), projected, gates);
        let names = ["ssm_skip", "mamba2_y_add_d"].map(name);
        let io = [&mut s.convolved, &mut s.skip, &mut s.scanned];
        ops.add_scaled_heads(names, heads, &self.skip, io);
        let (gates, scanned) = (&mut s.gates, &mut s.scanned);
        ops.glu(name("ssm_gated"), Glu::Swiglu, gates, scanned);
        let names = ["norm", "ssm_norm"].map(name);
        let device = ops.at(self.il).device;
        ops.norm(device, names, gates, &self.output_norm, &mut s.skip);
        ops.mul_mat(name("mamba_out"), &self.output, &mut s.skip, out);
    }
}
