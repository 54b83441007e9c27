//! `kimi-linear` (Kimi Linear, Moonshot AI).
//!
//! - Layers without key and value heads have Kimi Delta Attention. The others have multi-head latent attention without RoPE, whose heads
//!   attend to compressed rows; the queries are not compressed.
//! - The first `leading_dense_block_count` layers are dense.
//! - The router uses the function of `expert_gating_func`, and adds `exp_probs_b` before the top-k selection. The weights of the selected
//!   experts are normalized to a sum of 1, and may be scaled.
//! - A shared expert without a gate, `expert_shared_count` times as wide as a routed expert.
//!
//! llama.cpp also accepts compressed queries and keys and values in one matrix (`attn_kv_b`), but its graph cannot compute them.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, LatentSpec, RopeLayers};
use crate::cpu::delta_net::{Heads, KeyHeads};
use crate::error::Result;
use crate::hparams::{HParams, Keys, LayerCache, Layout, MAX_WIDTH, Rotated, StateShape};
use crate::moe::{MoeSpec, SharedExpert, SharedWidth};
use crate::recurrent::RecurrentSpec;
use crate::weights::Loader;

/// Maximum width of a head.
const MAX_HEAD: usize = 1 << 14;

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_dense = keys.n_dense()?;
    let layout = Layout {
        rotated: Rotated::Part,
        own_value_length: true,
        layers_without_heads: true,
        ..Layout::dense_first(n_dense)
    };
    let mut hp = HParams::read(keys, layout)?;
    let latent = read_latent(keys, &hp)?;
    for heads in &mut hp.heads {
        heads.v_dim = latent.kv_rank;
    }
    let heads = Heads {
        n_k: hp.n_head,
        n_v: hp.n_head,
        width: keys.count("kda.head_dim", MAX_HEAD)?,
        keys: KeyHeads::InTurn,
    };
    let shape = StateShape {
        channels: heads.qkv_width(),
        n_past: keys.convolution_past("ssm.conv_kernel")?,
        state: heads.state(),
    };
    for cache in &mut hp.caches {
        *cache = match *cache {
            LayerCache::Nothing => LayerCache::State(shape),
            _ => LayerCache::Keys,
        };
    }
    let shared = match keys.usize("expert_shared_count")? {
        // llama.cpp computes a shared expert whatever the number is.
        0 => SharedExpert::of_width(SharedWidth::Experts(1)),
        _ => SharedExpert::counted(keys, &hp)?,
    };
    let spec = DecoderSpec {
        embeddings: "model.embed_tokens",
        attention: AttentionSpec {
            output: "mla_out",
            rope_layers: RopeLayers::None,
            scale: Some(1.0 / (latent.key_dim as f32).sqrt()),
            latent: Some(latent),
            ..AttentionSpec::PLAIN
        },
        recurrent: Some(RecurrentSpec::Kda(heads)),
        n_dense,
        moe: MoeSpec {
            gating: keys.gating()?,
            selection_bias: true,
            norm_weights: true,
            weights_scale: keys.weights_scale()?,
            shared: Some(shared),
            ..MoeSpec::PLAIN
        },
        requires_output: true,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}

/// Reads the widths of the latent attention.
fn read_latent(keys: &Keys, hp: &HParams) -> Result<LatentSpec> {
    let kv_rank = keys.count("attention.kv_lora_rank", MAX_WIDTH)?;
    let key_dim = keys.count("attention.key_length_mla", MAX_HEAD)?;
    let n_end = hp.rope.n_dims;
    if n_end >= key_dim {
        let reason = format!("it must be less than the width of a head of keys, {key_dim}");
        return Err(keys.bad("rope.dimension_count", n_end, &reason));
    }
    if hp.head_dim != kv_rank + n_end {
        let reason = format!(
            "it must be the sum of `attention.kv_lora_rank` and `rope.dimension_count`, {}",
            kv_rank + n_end
        );
        return Err(keys.bad("attention.key_length", hp.head_dim, &reason));
    }
    if hp.n_head_kv != 1 {
        let reason = "it must be 1 in layers with attention";
        return Err(keys.bad("attention.head_count_kv", hp.n_head_kv, reason));
    }
    Ok(LatentSpec {
        q_rank: None,
        kv_rank,
        key_dim,
        value_dim: keys.count("attention.value_length_mla", MAX_HEAD)?,
        absorbed: true,
        temperature: None,
    })
}
