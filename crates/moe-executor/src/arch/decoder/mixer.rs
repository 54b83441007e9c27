//! The part of a layer that combines the tokens of a sequence: attention, a recurrent layer, or nothing.

use moe_gguf::LayerId;

use super::spec::DecoderSpec;
use super::state::State;
use crate::attention::AttentionLayer;
use crate::error::Result;
use crate::hparams::{HParams, LayerCache};
use crate::kv_cache::KvCache;
use crate::ops::{At, Ops};
use crate::recurrent::{DeltaNet, Kda, Mamba2, RecurrentSpec, ShortConv};
use crate::weights::Loader;

/// The weights of attention or of a recurrent layer, with the norm of its input.
pub(super) enum Mixer<'g> {
    Attention(Box<AttentionLayer<'g>>),
    ShortConv(Box<ShortConv<'g>>),
    DeltaNet(Box<DeltaNet<'g>>),
    Kda(Box<Kda<'g>>),
    Mamba2(Box<Mamba2<'g>>),
    /// The layer has a block only.
    None,
}

impl<'g> Mixer<'g> {
    pub(super) fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        spec: &DecoderSpec,
    ) -> Result<Mixer<'g>> {
        Ok(match (hp.caches[il.index()], spec.recurrent) {
            (LayerCache::State(shape), Some(RecurrentSpec::ShortConv)) => {
                Mixer::ShortConv(Box::new(ShortConv::load(loader, hp, il, shape)?))
            }
            (LayerCache::State(shape), Some(RecurrentSpec::DeltaNet(spec))) => {
                Mixer::DeltaNet(Box::new(DeltaNet::load(loader, hp, il, shape, spec)?))
            }
            (LayerCache::State(shape), Some(RecurrentSpec::Kda(heads))) => {
                Mixer::Kda(Box::new(Kda::load(loader, hp, il, shape, heads)?))
            }
            (LayerCache::State(_), Some(RecurrentSpec::Mamba2(mamba2))) => {
                Mixer::Mamba2(Box::new(Mamba2::load(loader, hp, il, &mamba2)?))
            }
            (LayerCache::Nothing, _) => Mixer::None,
            _ => {
                let attention = AttentionLayer::load(loader, hp, il, &spec.attention)?;
                Mixer::Attention(Box::new(attention))
            }
        })
    }

    /// Whether the layer has a block only.
    pub(super) fn is_none(&self) -> bool {
        matches!(self, Mixer::None)
    }

    /// Whether queries, keys and values are in one matrix.
    pub(super) fn is_fused(&self) -> bool {
        match self {
            Mixer::Attention(attention) => attention.is_fused(),
            Mixer::ShortConv(_)
            | Mixer::DeltaNet(_)
            | Mixer::Kda(_)
            | Mixer::Mamba2(_)
            | Mixer::None => false,
        }
    }

    /// Whether all inputs of a delta net or a delta attention are in one matrix.
    pub(super) fn has_joint_inputs(&self) -> bool {
        match self {
            Mixer::DeltaNet(layer) => layer.has_joint_inputs(),
            Mixer::Kda(layer) => layer.has_joint_inputs(),
            Mixer::Attention(_) | Mixer::ShortConv(_) | Mixer::Mamba2(_) | Mixer::None => false,
        }
    }

    /// Operations. Each writes one record per pass.
    pub(super) fn ops(&self) -> usize {
        match self {
            Mixer::Attention(attention) => attention.ops(),
            Mixer::ShortConv(layer) => layer.ops(),
            Mixer::DeltaNet(layer) => layer.ops(),
            Mixer::Kda(layer) => layer.ops(),
            Mixer::Mamba2(layer) => layer.ops(),
            Mixer::None => 0,
        }
    }

    /// The operations before the output product, on the residual stream `s.x`. Updates the cache.
    pub(super) fn mix(&self, ops: &mut Ops, at: At, s: &mut State, cache: &mut KvCache) {
        match self {
            Mixer::Attention(attention) => {
                attention.heads(ops, at, &mut s.attention, &mut s.x, cache);
            }
            Mixer::ShortConv(layer) => {
                layer.convolve(ops, at, &mut s.short_conv, &mut s.x, cache);
            }
            Mixer::DeltaNet(layer) => layer.read(ops, at, &mut s.delta_net, &mut s.x, cache),
            Mixer::Kda(layer) => layer.read(ops, at, &mut s.kda, &mut s.x, cache),
            Mixer::Mamba2(layer) => layer.scan(ops, at, &mut s.mamba2, &mut s.x, cache),
            Mixer::None => {}
        }
    }

    /// The output product in `s.block`, after [`Mixer::mix`].
    pub(super) fn output(&self, ops: &mut Ops, s: &mut State) {
        match self {
            Mixer::Attention(attention) => attention.output(ops, &mut s.attention, &mut s.block),
            Mixer::ShortConv(layer) => layer.output(ops, &mut s.short_conv, &mut s.block),
            Mixer::DeltaNet(layer) => layer.output(ops, &mut s.delta_net, &mut s.block),
            Mixer::Kda(layer) => layer.output(ops, &mut s.kda, &mut s.block),
            Mixer::Mamba2(layer) => layer.output(ops, &mut s.mamba2, &mut s.block),
            Mixer::None => {}
        }
    }
}
