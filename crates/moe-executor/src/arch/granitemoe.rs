//! `granitemoe` (Granite 3 and 4 MoE, IBM).
//!
//! - RoPE of adjacent pairs ([`RopeLayout::Neighbours`]), unless `rope.scaling.finetuned` is false.
//! - Factors on the embeddings, on the outputs of attention and experts, on the attention scores and on the logits.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1.
//! - The experts have the width of `feed_forward_length`. Some models have a shared expert.

use crate::arch::decoder::{Decoder, DecoderSpec, Scales};
use crate::attention::{AttentionSpec, RopeLayers};
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, RopeLayout};
use crate::moe::{MoeSpec, SharedExpert};
use crate::weights::{Bias, Loader};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let layout = Layout {
        longrope: true,
        ..Layout::all_moe(ExpertWidth::Dense)
    };
    let mut hp = HParams::read(keys, layout)?;
    hp.rope.layout = RopeLayout::Neighbours;
    let embedding = keys.opt_factor("embedding_scale")?;
    let logits = keys.f32("logit_scale")?;
    if logits == 0.0 {
        return Err(keys.bad("logit_scale", logits, "the logits are divided by it"));
    }
    let spec = DecoderSpec {
        attention: AttentionSpec {
            output_bias: Bias::Optional,
            rope_layers: RopeLayers::of_granite(keys)?,
            rope_factors: true,
            scale: keys.opt_factor("attention.scale")?,
            ..AttentionSpec::PLAIN
        },
        moe: MoeSpec {
            norm_weights: true,
            shared: SharedExpert::of_key(keys)?,
            ..MoeSpec::PLAIN
        },
        scales: Scales {
            embedding: embedding.map(|factor| (factor, ["embd_unscaled", "embd"])),
            residual: keys.opt_factor("residual_scale")?,
            logits: Some(1.0 / logits),
        },
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
