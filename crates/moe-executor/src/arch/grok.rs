//! `grok` (Grok-1 and Grok-2, xAI).
//!
//! - Factors on the embeddings and the logits; a header may contain a softcap of the logits, which is not supported.
//! - The attention scores have a softcap.
//! - Norms before and after attention and block.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1. The activation is [`Glu::Geglu`].
//! - Grok-2 also has a dense block in each layer.

use crate::arch::decoder::{Decoder, DecoderSpec, DenseBlock, LayerNorm, Scales};
use crate::attention::AttentionSpec;
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout};
use crate::moe::MoeSpec;
use crate::ops::Glu;
use crate::weights::Loader;

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    const FINAL: &str = "final_logit_softcapping";
    let bound = keys.f32_or(FINAL, 0.0)?;
    if bound != 0.0 {
        return Err(keys.bad(FINAL, bound, "final logit softcapping is not supported"));
    }
    let has_dense = loader.has("blk.0.ffn_up.weight");
    let layout = Layout {
        dense_everywhere: has_dense,
        ..Layout::all_moe(ExpertWidth::OwnOrDense)
    };
    let mut hp = HParams::read(keys, layout)?;
    let beta_slow = keys.f32_or("rope.scaling.yarn_beta_slow", 1.0)?;
    hp.rope.beta = (keys.f32_or("rope.scaling.yarn_beta_fast", 8.0)?, beta_slow);
    let ext_factor = keys.opt_f32("rope.scaling.yarn_ext_factor")?;
    if let Some(factor) = ext_factor.filter(|&factor| factor >= 0.0) {
        hp.rope.ext_factor = factor;
    }
    // The defaults are those of llama.cpp for old files.
    let embedding = keys.f32_or("embedding_scale", 78.383_67)?;
    let softcap = keys.f32_or("attn_logit_softcapping", 30.0)?;
    if softcap <= 0.0 {
        return Err(keys.bad("attn_logit_softcapping", softcap, "it must be positive"));
    }
    let post_ffn_norm = if loader.has("blk.0.layer_output_norm.weight") {
        "layer_output_norm"
    } else {
        "post_ffw_norm"
    };
    let spec = DecoderSpec {
        attention: AttentionSpec {
            scale: Some(keys.f32_or("attention.output_scale", 0.088_388_35)?),
            softcap: Some(softcap),
            in_steps: true,
            ..AttentionSpec::PLAIN
        },
        post_attention_norm: Some(LayerNorm {
            tensor: "attn_output_norm",
            node: "attn_out_norm",
        }),
        norms_output_rows: true,
        post_ffn_norm: Some(LayerNorm {
            tensor: post_ffn_norm,
            node: "ffn_post_norm",
        }),
        moe: MoeSpec {
            norm_weights: true,
            glu: Glu::Geglu,
            ..MoeSpec::PLAIN
        },
        dense_block: if has_dense {
            DenseBlock::WithExperts
        } else {
            DenseBlock::None
        },
        scales: Scales {
            embedding: (embedding != 0.0).then_some((embedding, ["embd_unscaled", "embd"])),
            residual: None,
            logits: Some(keys.f32_or("logit_scale", 0.577_350_26)?),
        },
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
