//! One layer of the decoder.

use std::f32::consts::FRAC_1_SQRT_2;

use moe_gguf::LayerId;

use super::mixer::Mixer;
use super::normed::Normed;
use super::spec::{DecoderSpec, DenseBlock, LayerNorm, OutputRows, StreamNames};
use super::state::{State, keep_rows, keep_tokens};
use crate::activation::{Activation, NodeName};
use crate::attention::AttentionLayer;
use crate::error::Result;
use crate::ffn::{FFN_OPS, Ffn};
use crate::hparams::HParams;
use crate::kv_cache::KvCache;
use crate::moe::MoeLayer;
use crate::norm::Norm;
use crate::ops::{At, Ops};
use crate::weights::{Loader, Vector};

/// The weights of a layer.
pub(super) struct DecoderLayer<'g> {
    il: LayerId,
    spec: DecoderSpec,
    pub(super) mixer: Mixer<'g>,
    /// `(n_embd)`
    post_attention_norm: PostNorm,
    /// Norm of the input of the block `(n_embd)`; `None` if the layer has no block, or the block has no norm or norms of its own.
    ffn_norm: Option<Norm>,
    block: Block<'g>,
    /// `(n_embd)`
    post_ffn_norm: PostNorm,
    /// Factor on the result of the layer `(1)`.
    scale: Option<Vector>,
    /// Name of the result of the layer.
    output: NodeName,
    /// Whether the output of the attention has the name of the norm before the experts.
    output_named_norm: bool,
}

/// A norm of an output with the name of its node, if the layer has one.
type PostNorm = Option<(Norm, &'static str)>;

enum Block<'g> {
    Dense(Box<Ffn<'g>>),
    Moe(Box<MoeLayer<'g>>),
    /// A dense block after the attention, and experts that read the input of the layer.
    Parallel(Box<Parallel<'g>>),
    /// A dense block and experts with the same input.
    Both(Box<(Ffn<'g>, MoeLayer<'g>)>),
    /// A dense block and experts with norms of their own.
    Normed(Box<Normed<'g>>),
    /// The layer has a mixer only.
    None,
}

struct Parallel<'g> {
    dense: Ffn<'g>,
    /// Norm of the input of the experts `(n_embd)`.
    norm: Norm,
    moe: MoeLayer<'g>,
}

impl<'g> DecoderLayer<'g> {
    pub(super) fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        spec: &DecoderSpec,
    ) -> Result<DecoderLayer<'g>> {
        let norm = |tensor: &str| {
            let part = format!("blk.{il}.{tensor}");
            Norm::load(loader, hp, &part, hp.n_embd, hp.norm_bias)
        };
        let post_norm = |name: Option<LayerNorm>| -> Result<PostNorm> {
            let norm = name.map(|name| Ok((norm(name.tensor)?, name.node)));
            norm.transpose()
        };
        let has_block = hp.has_block[il.index()];
        let is_moe = spec.is_moe(il.index());
        let block = if !has_block {
            Block::None
        } else if !is_moe {
            let n_ff = hp.n_ff_by_layer[il.index()];
            let dense = Ffn::load(loader, il, "", hp.n_embd, n_ff)?;
            let dense = dense.with_activation(spec.moe.glu);
            let limit = hp.swiglu_limits[il.index()].dense;
            Block::Dense(Box::new(dense.with_limit(limit)))
        } else if spec.dense_block == DenseBlock::Normed {
            Block::Normed(Box::new(Normed::load(loader, hp, il, &spec.moe)?))
        } else {
            let moe = MoeLayer::load(loader, hp, il, &spec.moe)?;
            match spec.dense_block {
                DenseBlock::None | DenseBlock::Normed => Block::Moe(Box::new(moe)),
                DenseBlock::BeforeExperts => Block::Parallel(Box::new(Parallel {
                    dense: Ffn::load(loader, il, "", hp.n_embd, hp.n_embd)?,
                    norm: norm("ffn_norm_exps")?,
                    moe,
                })),
                DenseBlock::WithExperts => {
                    let n_ff = hp.n_ff_by_layer[il.index()];
                    let dense = Ffn::load(loader, il, "", hp.n_embd, n_ff)?;
                    let dense = dense.with_activation(spec.moe.glu);
                    Block::Both(Box::new((dense, moe)))
                }
            }
        };
        let scale = format!("blk.{il}.layer_output_scale.weight");
        let has_scale = spec.layer_scales && loader.has(&scale);
        let scale = has_scale.then(|| loader.vector(&scale, 1));
        let has_norm = has_block && !matches!(block, Block::Normed(_)) && !spec.parallel;
        let ffn_norm = has_norm.then(|| norm(spec.ffn_norm.tensor));
        let output_named_norm = is_moe && spec.output_named_norm;
        let mut mixer_spec = *spec;
        let is_cropped =
            il.index() + 1 == hp.n_layer && spec.output_rows == OutputRows::InLastLayer;
        if output_named_norm && !is_cropped {
            mixer_spec.attention.output = spec.ffn_norm.node;
        }
        let output = match spec.stream_names {
            StreamNames::Output => NodeName::of(spec.output, il),
            StreamNames::Input if il.index() + 1 == hp.n_layer => NodeName::global("h_nextn"),
            StreamNames::Input => NodeName::of("attn_norm_in", LayerId(il.0 + 1)),
        };
        Ok(DecoderLayer {
            il,
            spec: *spec,
            mixer: Mixer::load(loader, hp, il, &mixer_spec)?,
            output_named_norm,
            post_attention_norm: post_norm(spec.post_attention_norm)?,
            ffn_norm: ffn_norm.transpose()?,
            block,
            post_ffn_norm: post_norm(spec.post_ffn_norm)?,
            scale: scale.transpose()?,
            output,
        })
    }

    pub(super) fn moe(&self) -> Option<&MoeLayer<'g>> {
        match &self.block {
            Block::Moe(moe) => Some(moe),
            Block::Parallel(parallel) => Some(&parallel.moe),
            Block::Both(both) => Some(&both.1),
            Block::Normed(normed) => Some(&normed.moe),
            Block::Dense(_) | Block::None => None,
        }
    }

    /// Operations of the layer: the number of those that write one record per pass, and of those that write one per token.
    pub(super) fn ops(&self, hp: &HParams) -> (usize, usize) {
        let (block, per_token) = match &self.block {
            Block::Dense(dense) => (dense.ops(), 0),
            Block::Moe(moe) => moe.ops(hp),
            Block::Parallel(parallel) => {
                let (block, per_token) = parallel.moe.ops(hp);
                (block + parallel.norm.ops() + FFN_OPS + 1, per_token)
            }
            Block::Both(both) => {
                let (block, per_token) = both.1.ops(hp);
                (block + FFN_OPS + 2, per_token)
            }
            Block::Normed(normed) => normed.ops(hp),
            Block::None => (0, 0),
        };
        let post_norms = [&self.post_attention_norm, &self.post_ffn_norm];
        let post_norms = post_norms.into_iter().flatten();
        let ffn_norm = self.ffn_norm.as_ref().map_or(0, Norm::ops);
        let norms = ffn_norm + post_norms.map(|(norm, _)| norm.ops()).sum::<usize>();
        // Mixer and block.
        let has_block = !matches!(self.block, Block::None);
        let sums = usize::from(!self.mixer.is_none()) + usize::from(has_block);
        let scales = sums * usize::from(self.spec.scales.residual.is_some())
            + usize::from(self.scale.is_some());
        (self.mixer.ops() + norms + scales + sums + block, per_token)
    }

    /// Runs the layer on the residual stream `s.x`. With `crop`, rows whose logits are not wanted are removed after the attention.
    pub(super) fn forward(
        &self,
        ops: &mut Ops,
        at: At,
        s: &mut State,
        cache: &mut KvCache,
        crop: bool,
    ) {
        match &self.mixer {
            Mixer::None => return self.block_only(ops, at, s),
            Mixer::Attention(attention) if self.spec.parallel => {
                return self.side_by_side(ops, at, s, cache, attention);
            }
            mixer => mixer.mix(ops, at, s, cache),
        }
        match &self.block {
            Block::None => self.mixer_only(ops, at, s),
            Block::Moe(moe) if self.spec.moe.routes_ahead => {
                self.routed_ahead(ops, at, s, moe, crop);
            }
            Block::Parallel(parallel) => self.parallel(ops, at, s, parallel, crop),
            _ => self.sequential(ops, at, s, crop, |ops, s| self.run_block(ops, at, s)),
        }
    }

    /// The operations of the block, from `s.normed`, or from `s.ffn_inp` if it has norms of its own, to `s.block`.
    fn run_block(&self, ops: &mut Ops, at: At, s: &mut State) {
        let (x, out) = (&mut s.normed, &mut s.block);
        match &self.block {
            Block::Dense(dense) => {
                dense.forward(ops, &mut s.dense, self.name("ffn_out"), x, out);
            }
            Block::Moe(moe) => moe.forward(ops, at.device, &mut s.moe, x, out),
            Block::Both(both) => {
                let (dense, moe) = both.as_ref();
                self.both(ops, at, s, dense, moe);
            }
            Block::Normed(normed) => normed.forward(ops, at, s),
            Block::Parallel(_) | Block::None => {}
        }
    }

    /// A layer without attention and recurrence.
    fn block_only(&self, ops: &mut Ops, at: At, s: &mut State) {
        let names = ["norm", self.spec.ffn_norm.node].map(|stem| self.name(stem));
        if let Some(norm) = &self.ffn_norm {
            ops.norm(at.device, names, &mut s.x, norm, &mut s.normed);
        }
        self.run_block(ops, at, s);
        self.scale_residual(ops, "ffn_out_scaled", &mut s.block);
        self.add_to_residual(ops, at, s);
    }

    /// The operations after the heads of a layer without a block.
    fn mixer_only(&self, ops: &mut Ops, at: At, s: &mut State) {
        self.mixer.output(ops, s);
        self.scale_residual(ops, "attn_out_scaled", &mut s.block);
        self.add_to_residual(ops, at, s);
    }

    /// Adds `s.block` to the residual stream `s.x`.
    fn add_to_residual(&self, ops: &mut Ops, at: At, s: &mut State) {
        let name = self.output;
        ops.add(at.device, name, &mut s.block, &mut s.x, &mut s.ffn_inp);
        s.x.take(&mut s.ffn_inp);
    }

    fn name(&self, stem: &'static str) -> NodeName {
        NodeName::of(stem, self.il)
    }

    /// The operations after the heads: the output of the attention, then the block, from `s.normed` or `s.ffn_inp` to `s.block`.
    fn sequential(
        &self,
        ops: &mut Ops,
        at: At,
        s: &mut State,
        crop: bool,
        run_block: impl FnOnce(&mut Ops, &mut State),
    ) {
        let device = at.device;
        let attention_rows = if self.output_named_norm {
            self.spec.ffn_norm.node
        } else {
            "attn_out_rows"
        };
        let names = [attention_rows, "l_out_rows"].map(|stem| self.name(stem));
        let residual_first = self.spec.residual_before_attention;
        if crop && residual_first {
            s.save_tokens(ops);
            keep_tokens(ops, &s.wanted);
            keep_rows(ops, device, names[1], &mut s.x, &s.wanted, &mut s.kept);
            s.restore_tokens(ops);
        }
        self.mixer.output(ops, s);
        let [before, after] = if self.spec.norms_output_rows {
            [&None, &self.post_attention_norm]
        } else {
            [&self.post_attention_norm, &None]
        };
        let buffers = [&mut s.block, &mut s.normed];
        let first = self.name("norm");
        let [attended, free] = self.post_norm(ops, (at, first), before, buffers);
        if crop {
            keep_tokens(ops, &s.wanted);
            keep_rows(ops, device, names[0], attended, &s.wanted, &mut s.kept);
            if s.wanted.is_empty() {
                return;
            }
        }
        let [attended, _] = self.post_norm(ops, (at, first), after, [attended, free]);
        self.scale_residual(ops, "attn_out_scaled", attended);
        if crop && !residual_first {
            keep_rows(ops, device, names[1], &mut s.x, &s.wanted, &mut s.kept);
        }
        let sum = self.name(self.spec.ffn_inp);
        let [a, b] = if residual_first {
            [&mut s.x, attended]
        } else {
            [attended, &mut s.x]
        };
        ops.add(device, sum, a, b, &mut s.ffn_inp);
        self.input_norm(ops, at, s);
        run_block(ops, s);
        let first = if self.spec.global_post_ffn_norm {
            NodeName::global("norm")
        } else {
            first
        };
        let (norm, buffers) = (&self.post_ffn_norm, [&mut s.block, &mut s.normed]);
        let [out, _] = self.post_norm(ops, (at, first), norm, buffers);
        self.scale_residual(ops, "ffn_out_scaled", out);
        let terms = if self.spec.residual_first {
            [&mut s.ffn_inp, out]
        } else {
            [out, &mut s.ffn_inp]
        };
        let [a, b] = terms;
        let Some(scale) = &self.scale else {
            ops.add(device, self.output, a, b, &mut s.x);
            return;
        };
        ops.add(device, self.name("l_out_unscaled"), a, b, &mut s.x);
        ops.multiply(self.output, scale, &mut s.x);
    }

    /// All operations if the attention and the block read the same normed input. Like in llama.cpp's graph, the block is computed before
    /// the heads.
    fn side_by_side(
        &self,
        ops: &mut Ops,
        at: At,
        s: &mut State,
        cache: &mut KvCache,
        attention: &AttentionLayer,
    ) {
        let device = at.device;
        attention.inputs(ops, at, &mut s.attention, &mut s.x, cache);
        attention.attend(ops, at, &mut s.attention, cache);
        let (x, out) = (s.attention.normed(), &mut s.block);
        if let Block::Dense(dense) = &self.block {
            dense.forward(ops, &mut s.dense, self.name("ffn_out"), x, out);
        } else if let Some(moe) = self.moe() {
            moe.forward(ops, device, &mut s.moe, x, out);
        }
        let sum = self.name("ffn_residual");
        ops.add(device, sum, &mut s.block, &mut s.x, &mut s.ffn_inp);
        attention.output(ops, &mut s.attention, &mut s.block);
        let (a, b) = (&mut s.ffn_inp, &mut s.block);
        ops.add(device, self.output, a, b, &mut s.x);
    }

    /// The operations after the heads if the router reads the input of the layer: the router, then the others.
    fn routed_ahead(&self, ops: &mut Ops, at: At, s: &mut State, moe: &MoeLayer, crop: bool) {
        moe.scores(ops, &mut s.moe, &mut s.x);
        if crop {
            s.save_tokens(ops);
            keep_tokens(ops, &s.wanted);
            let name = self.name("ffn_moe_logits_rows");
            let scores = &mut s.moe.router.scores;
            keep_rows(ops, at.device, name, scores, &s.wanted, &mut s.kept);
        }
        let mut weights = self.name("");
        if !crop || !s.wanted.is_empty() {
            weights = moe.route(ops, &mut s.moe);
        }
        if crop {
            s.restore_tokens(ops);
        }
        self.sequential(ops, at, s, crop, |ops, s| {
            let io = [&mut s.normed, &mut s.block];
            moe.forward_selected(ops, at.device, &mut s.moe, weights, io);
        });
    }

    /// The operations after the heads: the experts, then the output of the attention and the dense block.
    fn parallel(&self, ops: &mut Ops, at: At, s: &mut State, parallel: &Parallel, crop: bool) {
        let device = at.device;
        if crop {
            s.save_tokens(ops);
            keep_tokens(ops, &s.wanted);
            let name = self.name("l_out_rows");
            keep_rows(ops, device, name, &mut s.x, &s.wanted, &mut s.kept);
        }
        if !crop || !s.wanted.is_empty() {
            let names = ["norm", "ffn_norm_exps"].map(|stem| self.name(stem));
            ops.norm(device, names, &mut s.x, &parallel.norm, &mut s.normed);
            let (x, out) = (&mut s.normed, &mut s.experts);
            parallel.moe.forward(ops, device, &mut s.moe, x, out);
        }
        if crop {
            s.restore_tokens(ops);
        }
        self.mixer.output(ops, s);
        if crop {
            keep_tokens(ops, &s.wanted);
            let name = self.name("attn_out_rows");
            keep_rows(ops, device, name, &mut s.block, &s.wanted, &mut s.kept);
            if s.wanted.is_empty() {
                return;
            }
        }
        let sum = self.name(self.spec.ffn_inp);
        ops.add(device, sum, &mut s.block, &mut s.x, &mut s.ffn_inp);
        self.input_norm(ops, at, s);
        let name = self.name("ffn_out");
        let (x, out) = (&mut s.normed, &mut s.block);
        parallel.dense.forward(ops, &mut s.dense, name, x, out);
        ops.add(device, name, &mut s.block, &mut s.ffn_inp, &mut s.normed);
        let (a, b) = (&mut s.experts, &mut s.normed);
        ops.add(device, self.output, a, b, &mut s.x);
    }

    /// The block of a dense block and experts: the sum of both, divided by √2, in `s.block`.
    fn both(&self, ops: &mut Ops, at: At, s: &mut State, dense: &Ffn, moe: &MoeLayer) {
        let (x, out) = (&mut s.normed, &mut s.experts);
        moe.forward(ops, at.device, &mut s.moe, x, out);
        let (x, out) = (&mut s.normed, &mut s.block);
        let name = self.name("ffn_out");
        dense.forward(ops, &mut s.dense, name, x, out);
        let (a, b) = (&mut s.block, &mut s.experts);
        ops.add(at.device, self.name("ffn_sum"), a, b, &mut s.normed);
        ops.scale(name, FRAC_1_SQRT_2, &mut s.normed);
        s.block.take(&mut s.normed);
    }

    /// The norm of `s.ffn_inp` in `s.normed`.
    fn input_norm(&self, ops: &mut Ops, at: At, s: &mut State) {
        let node = if self.output_named_norm {
            "ffn_inp_normed"
        } else {
            self.spec.ffn_norm.node
        };
        let names = ["norm", node].map(|stem| self.name(stem));
        let (src, dst) = (&mut s.ffn_inp, &mut s.normed);
        if let Some(norm) = &self.ffn_norm {
            ops.norm(at.device, names, src, norm, dst);
        }
    }

    /// The norm of the first buffer in the second, if the layer has one; `first` is the name of its first node. Returns the buffer of
    /// the result, then the other.
    fn post_norm<'s>(
        &self,
        ops: &mut Ops,
        (at, first): (At, NodeName),
        norm: &PostNorm,
        [x, dst]: [&'s mut Activation; 2],
    ) -> [&'s mut Activation; 2] {
        let Some((norm, node)) = norm else {
            return [x, dst];
        };
        ops.norm(at.device, [first, self.name(node)], x, norm, dst);
        [dst, x]
    }

    fn scale_residual(&self, ops: &mut Ops, stem: &'static str, x: &mut Activation) {
        if let Some(factor) = self.spec.scales.residual {
            ops.scale(self.name(stem), factor, x);
        }
    }
}
