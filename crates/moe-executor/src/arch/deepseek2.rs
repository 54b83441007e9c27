//! `deepseek2` (DeepSeek V2 to V3.1 and R1, Kimi K2, GLM-4.7-Flash, …) and `mistral4` (Mistral 4).
//!
//! - Multi-head latent attention in both formats of files; small models do not compress the queries. RoPE of adjacent pairs
//!   ([`RopeLayout::Neighbours`]). YaRN also has a factor on the attention scores.
//! - A header may have factors on the queries that grow with the position.
//! - The first `leading_dense_block_count` layers are dense.
//! - The router uses the function of `expert_gating_func`, with a selection bias if the file has it. Experts are selected from the best
//!   groups, if the header has groups; the weights of the selected experts may be normalized and scaled.
//! - A shared expert without a gate, `expert_shared_count` times as wide as a routed expert.
//! - The blocks of the MTP head are omitted.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, LatentSpec, Temperature};
use crate::error::{Error, Result};
use crate::hparams::{Gating, HParams, Keys, LayerCache, Layout, MAX_WIDTH, RopeLayout, Rotated};
use crate::moe::{MoeSpec, SharedExpert};
use crate::weights::Loader;

/// Maximum width of a head.
const MAX_HEAD: usize = 1 << 14;

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_dense = keys.n_dense()?;
    let layout = Layout {
        rotated: Rotated::Part,
        own_value_length: true,
        ..Layout::dense_first(n_dense)
    };
    let mut hp = HParams::read(keys, layout)?;
    loader.omit_mtp(hp.n_layer, keys.n_block());
    hp.rope.layout = RopeLayout::Neighbours;
    // The headers do not contain `mscale`. Like llama.cpp, it is that of the published models.
    let scores = hp.rope.read_multiplier(keys, keys.arch() == "deepseek2")?;
    let n_vocab = keys.opt_usize("vocab_size")?.unwrap_or(hp.n_vocab);
    let latent = read_latent(keys, &mut hp, n_vocab)?;
    // Older headers have no gating function.
    let is_glm = matches!(hp.n_layer, 47 | 48) && n_vocab == 154_880;
    let gating = if is_glm {
        Gating::Sigmoid
    } else {
        Gating::Softmax
    };
    let gating = keys.gating_or(gating)?;
    let has_bias = loader.has_selection_bias(n_dense);
    let shared = SharedExpert::counted(keys, &hp)?;
    let spec = DecoderSpec {
        attention: AttentionSpec {
            scale: Some(scores / (latent.key_dim as f32).sqrt()),
            latent: Some(latent),
            ..AttentionSpec::PLAIN
        },
        n_dense,
        moe: MoeSpec::from_keys(keys, gating, has_bias, Some(shared))?,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}

/// Reads the widths of the attention. If its heads attend to compressed rows, sets the widths of the cache.
fn read_latent(keys: &Keys, hp: &mut HParams, n_vocab: usize) -> Result<LatentSpec> {
    const KEY_DIM: &str = "attention.key_length_mla";
    const VALUE_DIM: &str = "attention.value_length_mla";
    let kv_rank = keys.count("attention.kv_lora_rank", MAX_WIDTH)?;
    let n_rot = hp.rope.n_dims;
    let absorbed = keys.is_set(KEY_DIM)?;
    if absorbed != keys.is_set(VALUE_DIM)? {
        let [set, unset] = if absorbed {
            [KEY_DIM, VALUE_DIM]
        } else {
            [VALUE_DIM, KEY_DIM]
        };
        let reason = format!("`{set}` is set, so this key must be set, too");
        return Err(keys.bad(unset, 0, &reason));
    }
    let (key_dim, value_dim) = if absorbed {
        let key_dim = keys.count(KEY_DIM, MAX_HEAD)?;
        (key_dim, keys.count(VALUE_DIM, MAX_HEAD)?)
    } else {
        (hp.head_dim, hp.heads[0].v_dim)
    };
    if n_rot >= key_dim {
        let reason = format!("it must be less than the width of a head of keys, {key_dim}");
        return Err(keys.bad("rope.dimension_count", n_rot, &reason));
    }
    let (head_dim, n_head_kv) = if absorbed {
        (kv_rank + n_rot, 1)
    } else {
        (key_dim, hp.n_head)
    };
    if hp.head_dim != head_dim {
        let reason = format!(
            "it must be the sum of `attention.kv_lora_rank` and `rope.dimension_count`, {head_dim}"
        );
        return Err(keys.bad("attention.key_length", hp.head_dim, &reason));
    }
    if hp.n_head_kv != n_head_kv {
        let reason = format!("it must be {n_head_kv}");
        return Err(keys.bad("attention.head_count_kv", hp.n_head_kv, &reason));
    }
    if absorbed {
        for heads in &mut hp.heads {
            heads.v_dim = kv_rank;
        }
        hp.caches = vec![LayerCache::Keys; hp.n_layer];
    }
    Ok(LatentSpec {
        q_rank: read_q_rank(keys, hp, n_vocab)?,
        kv_rank,
        key_dim,
        value_dim,
        absorbed,
        temperature: read_temperature(keys)?,
    })
}

/// Width of the compressed queries. Like llama.cpp, models with the sizes of DeepSeek V2 Lite, GigaChat 3 and Kanana 2 have none,
/// whatever their header contains.
fn read_q_rank(keys: &Keys, hp: &HParams, n_vocab: usize) -> Result<Option<usize>> {
    const KEY: &str = "attention.q_lora_rank";
    let is_lite = matches!(hp.n_layer, 26 | 27) || (hp.n_layer == 48 && n_vocab == 128_256);
    if is_lite {
        return Ok(None);
    }
    match keys.usize(KEY)? {
        0 => Ok(None),
        _ => Ok(Some(keys.count(KEY, MAX_WIDTH)?)),
    }
}

fn read_temperature(keys: &Keys) -> Result<Option<Temperature>> {
    let scale = keys.opt_factor("attention.temperature_scale")?;
    let temperature = scale.map(|scale| {
        let length = keys.count("attention.temperature_length", 1 << 30)?;
        Ok::<_, Error>(Temperature {
            scale,
            length,
            offset: 0,
        })
    });
    temperature.transpose()
}
