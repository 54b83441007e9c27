//! `granitehybrid` (Granite 4 MoE with Mamba-2 layers, IBM).
//!
//! - Layers without key and value heads have Mamba-2 instead of attention. All layers have experts.
//! - RoPE of adjacent pairs ([`RopeLayout::Neighbours`]), unless `rope.scaling.finetuned` is false.
//! - Factors on the embeddings, on the outputs of attention, Mamba-2 and experts, on the attention scores and on the logits.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1.
//! - The experts have the width of `feed_forward_length`. Some models have a shared expert.

use crate::arch::decoder::{Decoder, DecoderSpec, Scales};
use crate::attention::{AttentionSpec, RopeLayers};
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, LayerCache, Layout, RopeLayout, Rotated};
use crate::moe::{MoeSpec, SharedExpert};
use crate::recurrent::{Mamba2Spec, RecurrentSpec};
use crate::weights::{Bias, Loader};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let layout = Layout {
        rotated: Rotated::Part,
        layers_without_heads: true,
        ..Layout::all_moe(ExpertWidth::Dense)
    };
    let mut hp = HParams::read(keys, layout)?;
    hp.rope.layout = RopeLayout::Neighbours;
    let mamba2 = Mamba2Spec::read(keys)?;
    let (width, expected) = (mamba2.width(), 2 * hp.n_embd);
    if width != expected {
        let reason = format!("llama.cpp supports only twice the `embedding_length`, {expected}");
        return Err(keys.bad("ssm.inner_size", width, &reason));
    }
    for cache in &mut hp.caches {
        if *cache == LayerCache::Nothing {
            *cache = LayerCache::State(mamba2.state());
        }
    }
    let embedding = keys.opt_factor("embedding_scale")?;
    let logits = keys.opt_factor("logit_scale")?;
    let spec = DecoderSpec {
        attention: AttentionSpec {
            output_bias: Bias::Optional,
            rope_layers: RopeLayers::of_granite(keys)?,
            rope_factors: true,
            scale: keys.opt_factor("attention.scale")?,
            ..AttentionSpec::PLAIN
        },
        recurrent: Some(RecurrentSpec::Mamba2(mamba2)),
        moe: MoeSpec {
            norm_weights: true,
            shared: SharedExpert::of_key(keys)?,
            ..MoeSpec::PLAIN
        },
        scales: Scales {
            embedding: embedding.map(|factor| (factor, ["embd_unscaled", "embd"])),
            residual: keys.opt_factor("residual_scale")?,
            logits: logits.map(|scale| 1.0 / scale),
        },
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
