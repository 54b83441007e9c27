//! The decoder of all supported architectures: layers of attention and a MoE or dense block, each with pre-normalization
//! (RMS norm) and a residual connection.

use moe_gguf::LayerId;

use crate::activation::{Activation, NodeName};
use crate::attention::{AttentionLayer, AttentionSpec, AttentionState};
use crate::buffers::{Input, Inventory};
use crate::device_id::DeviceId;
use crate::error::Result;
use crate::ffn::{FFN_OPS, Ffn, FfnState};
use crate::hparams::HParams;
use crate::kv_cache::KvCache;
use crate::moe::{MoeLayer, MoeSpec, MoeState};
use crate::ops::Ops;
use crate::weights::{Loader, Vector};

/// The layers of an architecture.
#[derive(Clone, Copy)]
pub struct DecoderSpec {
    /// Attention.
    pub attention: AttentionSpec,
    /// Norm before the MoE or dense block: the name of its tensor and of its node.
    pub ffn_norm: (&'static str, &'static str),
    /// Number of dense layers, which come first.
    pub n_dense: usize,
    /// MoE layers.
    pub moe: MoeSpec,
    /// Where the output rows are selected.
    pub output_rows: OutputRows,
}

/// Where llama.cpp's graph selects the rows of a prompt whose logits are wanted (`inp_out_ids`). Later operations compute
/// these rows only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OutputRows {
    /// In the last layer, between attention and experts.
    InLastLayer,
    /// After the last layer.
    AfterLastLayer,
}

impl DecoderSpec {
    /// [`AttentionSpec::PLAIN`] and [`MoeSpec::PLAIN`] in all layers.
    pub const PLAIN: DecoderSpec = DecoderSpec {
        attention: AttentionSpec::PLAIN,
        ffn_norm: ("ffn_norm", "ffn_norm"),
        n_dense: 0,
        moe: MoeSpec::PLAIN,
        output_rows: OutputRows::InLastLayer,
    };
}

/// The layers of a model with their weights.
pub struct Decoder<'g> {
    hp: HParams,
    spec: DecoderSpec,
    layers: Vec<DecoderLayer<'g>>,
}

struct DecoderLayer<'g> {
    attention: AttentionLayer<'g>,
    /// `(n_embd)`
    ffn_norm: Vector,
    block: Block<'g>,
}

enum Block<'g> {
    Dense(Box<Ffn<'g>>),
    Moe(Box<MoeLayer<'g>>),
}

impl<'g> Decoder<'g> {
    pub(crate) fn load(loader: &Loader<'g>, hp: HParams, spec: DecoderSpec) -> Result<Decoder<'g>> {
        let layer = |il: LayerId| -> Result<DecoderLayer<'g>> {
            let block = if il.index() < spec.n_dense {
                let n_ff = hp.n_ff_by_layer[il.index()];
                Block::Dense(Box::new(Ffn::load(loader, il, "", hp.n_embd, n_ff)?))
            } else {
                Block::Moe(Box::new(MoeLayer::load(loader, &hp, il, &spec.moe)?))
            };
            let ffn_norm = format!("blk.{il}.{}.weight", spec.ffn_norm.0);
            Ok(DecoderLayer {
                attention: AttentionLayer::load(loader, &hp, il, &spec.attention)?,
                ffn_norm: loader.vector(&ffn_norm, hp.n_embd)?,
                block,
            })
        };
        let layers = hp.layers().map(layer).collect::<Result<_>>()?;
        Ok(Decoder { hp, spec, layers })
    }

    /// Hyper-parameters.
    pub fn hparams(&self) -> &HParams {
        &self.hp
    }

    /// Properties of its layers.
    pub(crate) fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// The MoE block of a layer; `None` for dense layers and layers beyond the last.
    pub(crate) fn moe(&self, layer: LayerId) -> Option<&MoeLayer<'g>> {
        match &self.layers.get(layer.index())?.block {
            Block::Moe(moe) => Some(moe),
            Block::Dense(_) => None,
        }
    }

    /// Runs all layers on the residual stream `s.x`. Afterwards `s.x` contains only the rows whose logits are wanted.
    pub fn forward(&self, ops: &mut Ops, s: &mut State, cache: &mut KvCache) {
        for (il, layer) in self.hp.layers().zip(&self.layers) {
            let last = il.index() + 1 == self.layers.len();
            let name = |stem| NodeName::of(stem, il);
            let at = ops.at(il);
            let device = at.device;
            let (state, out) = (&mut s.attention, &mut s.block);
            layer
                .attention
                .forward(ops, at, state, &mut s.x, cache, out);
            if last && self.spec.output_rows == OutputRows::InLastLayer {
                s.keep_tokens(ops);
                let State {
                    block,
                    x,
                    kept,
                    wanted,
                    ..
                } = s;
                keep_rows(ops, device, name("attn_out_rows"), block, wanted, kept);
                keep_rows(ops, device, name("l_out_rows"), x, wanted, kept);
                if wanted.is_empty() {
                    return;
                }
            }
            let (block, x) = (&mut s.block, &mut s.x);
            ops.add(device, name("ffn_inp"), block, x, &mut s.ffn_inp);
            let names = ["norm", self.spec.ffn_norm.1].map(name);
            let eps = self.hp.rms_eps;
            ops.rms_norm(
                device,
                names,
                &mut s.ffn_inp,
                &layer.ffn_norm,
                eps,
                &mut s.normed,
            );
            match &layer.block {
                Block::Dense(ffn) => {
                    let out = &mut s.block;
                    ffn.forward(ops, &mut s.dense, name("ffn_out"), &mut s.normed, out);
                }
                Block::Moe(moe) => {
                    moe.forward(ops, device, &mut s.moe, &mut s.normed, &mut s.block);
                }
            }
            let (block, ffn_inp) = (&mut s.block, &mut s.ffn_inp);
            ops.add(device, name("l_out"), block, ffn_inp, &mut s.x);
        }
        if self.spec.output_rows == OutputRows::AfterLastLayer && !s.wanted.is_empty() {
            s.keep_tokens(ops);
            let (device, name) = (ops.output_device(), NodeName::global("l_out_rows"));
            keep_rows(ops, device, name, &mut s.x, &s.wanted, &mut s.kept);
        }
    }

    /// The number of operations that write one record per pass, and the number of those that write one per token.
    pub fn ops(&self) -> (usize, usize) {
        // Two residual additions, and two operations of the norm before the experts.
        const OWN: usize = 4;
        // Of `block` and `x`, or of `x` only.
        const OUTPUT_ROWS: usize = 2;
        let (mut pass, mut token) = (OUTPUT_ROWS, 0);
        for (layer, &n_expert_used) in self.layers.iter().zip(&self.hp.n_expert_used_by_layer) {
            let (block_pass, block_token) = match &layer.block {
                Block::Dense(_) => (FFN_OPS, 0),
                Block::Moe(_) => self.spec.moe.ops(&self.hp, n_expert_used),
            };
            pass += self.spec.attention.ops() + OWN + block_pass;
            token += block_token;
        }
        (pass, token)
    }
}

/// Removes all rows of `x` except the wanted ones.
fn keep_rows(
    ops: &mut Ops,
    device: DeviceId,
    name: NodeName,
    x: &mut Activation,
    wanted: &[u32],
    kept: &mut Activation,
) {
    ops.get_rows(device, name, x, wanted, kept);
    x.take(kept);
}

/// Buffers of a pass, shared by all layers.
pub struct State {
    /// Residual stream `(token, n_embd)`.
    pub x: Activation,
    /// Normed input of the experts or of the output `(token, n_embd)`.
    pub normed: Activation,
    /// Output of the attention, then of the MoE or dense block `(token, n_embd)`.
    pub block: Activation,
    /// Residual stream between attention and experts `(token, n_embd)`.
    pub ffn_inp: Activation,
    /// Scratch for the selection of rows.
    pub kept: Activation,
    /// Logits `(wanted, n_vocab)`.
    pub logits: Activation,
    /// Buffers of the attention.
    pub attention: AttentionState,
    /// Buffers of the dense layers.
    pub dense: FfnState,
    /// Buffers of the MoE layers.
    pub moe: MoeState,
    /// Token ids of the batch.
    pub tokens: Vec<u32>,
    /// Rows whose logits are wanted, ascending.
    pub wanted: Vec<u32>,
}

impl Default for State {
    fn default() -> Self {
        State {
            x: Activation::new(1),
            normed: Activation::new(2),
            block: Activation::new(3),
            ffn_inp: Activation::new(4),
            kept: Activation::new(5),
            logits: Activation::new(6),
            attention: AttentionState::new(32),
            dense: FfnState::new(48),
            moe: MoeState::new(64),
            tokens: Vec::new(),
            wanted: Vec::new(),
        }
    }
}

impl State {
    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("residual stream", &self.x);
        inventory.activation("block input", &self.normed);
        inventory.activation("block output", &self.block);
        inventory.activation("residual stream before the experts", &self.ffn_inp);
        inventory.activation("kept rows", &self.kept);
        inventory.activation("logits", &self.logits);
        inventory.vector(Input::Tokens.buffer_id(), "token ids", &self.tokens);
        inventory.vector(Input::Wanted.buffer_id(), "wanted rows", &self.wanted);
        self.attention.buffers(inventory);
        self.dense.buffers(inventory);
        self.moe.buffers(inventory);
    }

    /// Removes all tokens except those of the wanted rows, for the operations that follow.
    fn keep_tokens(&self, ops: &mut Ops) {
        // Rows ascend, so each token is read before its place is overwritten.
        for (at, &row) in self.wanted.iter().enumerate() {
            ops.positions[at] = ops.positions[row as usize];
            ops.sequences[at] = ops.sequences[row as usize];
        }
        ops.positions.truncate(self.wanted.len());
        ops.sequences.truncate(self.wanted.len());
    }
}
