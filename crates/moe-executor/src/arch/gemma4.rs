//! `gemma4` (Gemma 4 26B-A4B, Google).
//!
//! - The embeddings are multiplied by the root of their width. The logits have a softcap.
//! - A sliding window in the layers that the header lists. The other layers have heads of another width and number, and divisors of
//!   the RoPE frequencies.
//! - RMS norm of queries and keys per head, and of values without weights. Layers without `attn_v` use the keys as values. The scores
//!   have no factor.
//! - The last layers may read the keys and values of earlier ones.
//! - Norms before and after attention, experts and dense block; both blocks read the same input. The router has a norm without weights
//!   and a vector of factors.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1. Each expert may have a factor. The activation
//!   is [`Glu::Geglu`].
//! - A layer may have a factor on its result.

use moe_gguf::LayerId;

use crate::arch::decoder::{Decoder, DecoderSpec, DenseBlock, LayerNorm, OutputRows};
use crate::attention::{AttentionSpec, QkNames, QkNorm};
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, Rotated, WindowRules};
use crate::moe::MoeSpec;
use crate::ops::Glu;
use crate::weights::{Bias, Loader};

const ATTENTION: AttentionSpec = AttentionSpec {
    qkv_bias: Bias::None,
    output: "attn_o",
    qk_norm: Some(QkNorm::Head),
    names: QkNames {
        rotated: ["Qcur_pos", "Kcur_pos"],
        ..QkNames::USUAL
    },
    rope_factors: true,
    rope_factors_in_windows: false,
    values_from_keys: true,
    value_norm: Some("Vcur_normed"),
    reshaped: [true; 3],
    copies_columns: true,
    scale: Some(1.0),
    ..AttentionSpec::PLAIN
};

const WINDOW: WindowRules = WindowRules {
    own_widths: true,
    own_rotation: true,
    ..WindowRules::LISTED
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    refuse_layer_embeddings(keys)?;
    let n_dense = loader.n_without("ffn_gate_inp.weight");
    let layout = Layout {
        n_dense,
        dense_everywhere: true,
        rotated: Rotated::Part,
        heads_by_layer: true,
        own_value_length: true,
        ..Layout::all_moe(ExpertWidth::Own)
    };
    let mut hp = HParams::read(keys, layout)?;
    hp.read_window(keys, WINDOW)?;
    share_caches(keys, &mut hp)?;
    let full = {
        let mut layers = hp.heads.iter().zip(hp.windowed_layers());
        let full = layers.find(|(_, is_windowed)| !is_windowed);
        full.map(|(heads, _)| heads.k_dim)
    };
    if full.is_some() {
        loader.require("rope_freqs.weight")?;
    }
    let different = hp.heads.iter().find(|heads| heads.k_dim != heads.v_dim);
    if let Some(heads) = different {
        let reason = format!("it must equal the key length, {}", heads.k_dim);
        return Err(keys.bad("attention.value_length", heads.v_dim, &reason));
    }
    let bound = keys.f32_or("final_logit_softcapping", 30.0)?;
    let embedding = (hp.n_embd as f32).sqrt();
    let spec = DecoderSpec {
        attention: AttentionSpec {
            rope_factor_dims: full,
            ..ATTENTION
        },
        post_attention_norm: Some(LayerNorm {
            tensor: "post_attention_norm",
            node: "attn_post_norm",
        }),
        ffn_inp: "attn_out",
        post_ffn_norm: Some(LayerNorm {
            tensor: "post_ffw_norm",
            node: "ffn_post_norm",
        }),
        global_post_ffn_norm: true,
        n_dense,
        moe: MoeSpec {
            norm_weights: true,
            glu: Glu::Geglu,
            expert_scales: true,
            ..MoeSpec::PLAIN
        },
        dense_block: DenseBlock::Normed,
        output_rows: OutputRows::AfterNorm,
        output_norm: LayerNorm {
            tensor: "output_norm",
            node: "h_nextn",
        },
        logits_bound: (bound != 0.0).then_some(bound),
        embedding_rows: Some(embedding),
        layer_scales: true,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}

/// Embeddings of tokens for each layer, which Gemma 4 E2B and E4B have: dense models.
fn refuse_layer_embeddings(keys: &Keys) -> Result<()> {
    const KEY: &str = "embedding_length_per_layer_input";
    match keys.usize(KEY)? {
        0 => Ok(()),
        n => Err(keys.bad(KEY, n, "embeddings for each layer are not supported")),
    }
}

/// Sets the layers whose keys and values the last `attention.shared_kv_layers` layers read: the last layer with keys and values, or
/// the one before it in layers with a window, like in llama.cpp.
fn share_caches(keys: &Keys, hp: &mut HParams) -> Result<()> {
    const KEY: &str = "attention.shared_kv_layers";
    let n_shared = keys.opt_usize(KEY)?.unwrap_or(0);
    if n_shared == 0 {
        return Ok(());
    }
    let n_with_kv = hp.n_layer.saturating_sub(n_shared);
    if n_with_kv < 2 {
        let reason = "at least two layers must have keys and values";
        return Err(keys.bad(KEY, n_shared, reason));
    }
    let windowed: Vec<bool> = hp.windowed_layers().collect();
    let layers: Vec<LayerId> = hp.layers().collect();
    for layer in n_with_kv..hp.n_layer {
        let source = n_with_kv - if windowed[layer] { 2 } else { 1 };
        let [own, other] = [layer, source].map(|layer| hp.heads[layer]);
        if windowed[source] != windowed[layer] || (own.k_dim, own.n_kv) != (other.k_dim, other.n_kv)
        {
            let reason = format!(
                "layer {layer} cannot read the keys of layer {source}, whose heads have another shape or window"
            );
            return Err(keys.bad(KEY, n_shared, &reason));
        }
        hp.heads[layer].kv_layer = layers[source];
    }
    Ok(())
}
