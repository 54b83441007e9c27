//! `lfm2moe` (LFM2 MoE, Liquid AI).
//!
//! - Layers without key and value heads have a short convolution instead of attention.
//! - RMS norm of queries and keys per head.
//! - The first `leading_dense_block_count` layers are dense.
//! - The router uses the function of `expert_gating_func`, and adds `exp_probs_b` before the top-k selection. The weights of the selected
//!   experts are normalized to a sum of 1.
//! - The norm of the output is `token_embd_norm`.

use crate::arch::decoder::{Decoder, DecoderSpec, LayerNorm};
use crate::attention::{AttentionSpec, QkNames, QkNorm};
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, LayerCache, Layout, Rotated, StateShape};
use crate::moe::MoeSpec;
use crate::recurrent::RecurrentSpec;
use crate::weights::Loader;

const ATTENTION: AttentionSpec = AttentionSpec {
    norm: "model.layers.{}.operator_norm",
    output: "model.layers.{}.self_attn.out_proj",
    qk_norm: Some(QkNorm::Head),
    names: QkNames {
        normed: [
            "model.layers.{}.self_attn.q_layernorm",
            "model.layers.{}.self_attn.k_layernorm",
        ],
        ..QkNames::USUAL
    },
    ..AttentionSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_dense = keys.n_dense()?;
    let layout = Layout {
        n_dense,
        rotated: Rotated::Part,
        layers_without_heads: true,
        ..Layout::all_moe(ExpertWidth::Own)
    };
    let mut hp = HParams::read(keys, layout)?;
    let shape = StateShape {
        channels: hp.n_embd,
        n_past: keys.convolution_past("shortconv.l_cache")?,
        state: 0,
    };
    for cache in &mut hp.caches {
        if *cache == LayerCache::Nothing {
            *cache = LayerCache::State(shape);
        }
    }
    let spec = DecoderSpec {
        embeddings: "model.embed_tokens",
        attention: ATTENTION,
        recurrent: Some(RecurrentSpec::ShortConv),
        residual_before_attention: true,
        ffn_norm: LayerNorm {
            tensor: "ffn_norm",
            // llama.cpp names the norm like its output.
            node: "model.layers.{}.ffn_out",
        },
        n_dense,
        moe: MoeSpec {
            gating: keys.gating()?,
            selection_bias: true,
            norm_weights: true,
            ..MoeSpec::PLAIN
        },
        residual_first: true,
        output_norm: LayerNorm {
            tensor: "token_embd_norm",
            node: "result_norm",
        },
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
