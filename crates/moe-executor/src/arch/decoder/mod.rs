//! The decoder of all supported architectures: layers of attention and a MoE or dense block, each with pre-normalization and a
//! residual connection. [`DecoderSpec`] describes the differences.

mod layer;
mod mixer;
mod normed;
mod spec;
mod state;

use moe_gguf::LayerId;

use crate::activation::NodeName;
use crate::error::Result;
use crate::hparams::{HParams, Heads};
use crate::kv_cache::KvCache;
use crate::moe::MoeLayer;
use crate::ops::Ops;
use crate::weights::{Bias, Loader, Matrix};

use layer::DecoderLayer;
pub use spec::{DecoderSpec, DenseBlock, LayerNorm, OutputRows, Scales, StreamNames};
pub use state::State;
use state::{keep_rows, keep_tokens};

/// The layers of a model with their weights.
pub struct Decoder<'g> {
    hp: HParams,
    spec: DecoderSpec,
    layers: Vec<DecoderLayer<'g>>,
}

impl<'g> Decoder<'g> {
    pub(crate) fn load(loader: &Loader<'g>, hp: HParams, spec: DecoderSpec) -> Result<Decoder<'g>> {
        let layers = hp.layers();
        let layers = layers.map(|il| DecoderLayer::load(loader, &hp, il, &spec));
        let layers = layers.collect::<Result<_>>()?;
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
        self.layers.get(layer.index())?.moe()
    }

    /// The heads of the layers with queries, keys and values in one matrix.
    pub(crate) fn fused_heads(&self) -> impl Iterator<Item = &Heads> {
        let layers = self.layers.iter().zip(&self.hp.heads);
        let layers = layers.filter(|(layer, _)| layer.mixer.is_fused());
        layers.map(|(_, heads)| heads)
    }

    /// Whether a delta net or a delta attention has all its inputs in one matrix.
    pub(crate) fn has_joint_inputs(&self) -> bool {
        self.layers
            .iter()
            .any(|layer| layer.mixer.has_joint_inputs())
    }

    /// Looks up the embeddings of `s.tokens` and stores them in the residual stream `s.x`.
    pub fn embed(&self, ops: &mut Ops, weights: &Matrix, s: &mut State) {
        let scale = self.spec.scales.embedding;
        let [name, scaled] = match (scale, self.spec.embedding_rows) {
            (Some((_, names)), _) => names,
            (None, Some(_)) => ["embd_unscaled", "inp_scaled"],
            (None, None) => [self.spec.embeddings; 2],
        };
        let scaled = match self.spec.stream_names {
            StreamNames::Output => NodeName::global(scaled),
            StreamNames::Input => NodeName::of("attn_norm_in", LayerId(0)),
        };
        let is_scaled = scale.is_some() || self.spec.embedding_rows.is_some();
        let name = if is_scaled {
            NodeName::global(name)
        } else {
            scaled
        };
        ops.get_embeddings(name, weights, &s.tokens, &mut s.x);
        if let Some((factor, _)) = scale {
            ops.scale(scaled, factor, &mut s.x);
        }
        if let Some(factor) = self.spec.embedding_rows {
            ops.scale_rows(scaled, "inp_scale_rows", |_| factor, &mut s.x);
        }
    }

    /// Runs all layers on the residual stream `s.x`. Afterwards `s.x` contains only the rows whose logits are wanted, unless they are
    /// selected after the norm of the output.
    pub fn forward(&self, ops: &mut Ops, s: &mut State, cache: &mut KvCache) {
        for (il, layer) in self.hp.layers().zip(&self.layers) {
            let is_last = il.index() + 1 == self.layers.len();
            let crop = is_last && self.spec.output_rows == OutputRows::InLastLayer;
            let at = ops.at(il);
            layer.forward(ops, at, s, cache, crop);
        }
        if self.spec.output_rows == OutputRows::AfterLastLayer && !s.wanted.is_empty() {
            keep_tokens(ops, &s.wanted);
            let (device, name) = (ops.output_device(), NodeName::global("l_out_rows"));
            keep_rows(ops, device, name, &mut s.x, &s.wanted, &mut s.kept);
        }
    }

    /// Selects the rows of the normed output `s.normed` whose logits are wanted, if the architecture selects them there.
    pub fn select_normed_rows(&self, ops: &mut Ops, s: &mut State) {
        if self.spec.output_rows == OutputRows::AfterNorm {
            keep_tokens(ops, &s.wanted);
            let (device, name) = (ops.output_device(), NodeName::global("result_norm"));
            keep_rows(ops, device, name, &mut s.normed, &s.wanted, &mut s.kept);
        }
    }

    /// The number of operations that write one record per pass, and the number of those that write one per token.
    pub fn ops(&self) -> (usize, usize) {
        let output_rows = match self.spec.output_rows {
            // Of `block` and `x`, and of the scores of a router before the attention.
            OutputRows::InLastLayer => 2 + usize::from(self.spec.moe.routes_ahead),
            OutputRows::AfterLastLayer | OutputRows::AfterNorm => 1,
        };
        let (scales, bound) = (self.spec.scales, self.spec.logits_bound);
        let scales = usize::from(scales.embedding.is_some())
            + usize::from(self.spec.embedding_rows.is_some())
            + usize::from(scales.logits.is_some())
            + bound.map_or(0, |_| 3);
        let bias = usize::from(self.spec.logits_bias != Bias::None);
        // Of the norm of the output.
        let norm_bias = usize::from(self.hp.norm_bias);
        let outside = output_rows + scales + bias + norm_bias;
        let layers = self.layers.iter().map(|layer| layer.ops(&self.hp));
        layers.fold((outside, 0), |sum, layer| {
            (sum.0 + layer.0, sum.1 + layer.1)
        })
    }
}
