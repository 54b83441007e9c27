//! `deepseek2-ocr` (the text model of DeepSeek-OCR).
//!
//! - Attention without compression, whose key and value heads are as many as its query heads. RoPE has no context scaling.
//! - The first `leading_dense_block_count` layers are dense.
//! - The router uses the function of `expert_gating_func`, with a selection bias if the file has it; the weights of the selected
//!   experts may be normalized and scaled.
//! - A shared expert without a gate, `expert_shared_count` times as wide as a routed expert.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, QkNames};
use crate::error::Result;
use crate::hparams::{Gating, HParams, Keys, Layout, Rope, Rotated};
use crate::moe::{MoeSpec, SharedExpert};
use crate::weights::Loader;

const NAMES: QkNames = QkNames {
    rotated: ["q_pe", "k_pe"],
    ..QkNames::USUAL
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_dense = keys.n_dense()?;
    let layout = Layout {
        rotated: Rotated::Part,
        ..Layout::dense_first(n_dense)
    };
    let mut hp = HParams::read(keys, layout)?;
    check_heads(keys, &hp)?;
    // llama.cpp has the factor of context scaling on the scores, but RoPE without context scaling.
    let scores = hp.rope.apply_multiplier(0.0, true);
    hp.rope = Rope {
        n_dims: hp.head_dim,
        freq_scale: 1.0,
        ext_factor: 0.0,
        attn_factor: 1.0,
        ..hp.rope
    };
    let gating = keys.gating_or(Gating::Softmax)?;
    let has_bias = loader.has_selection_bias(n_dense);
    let shared = SharedExpert::counted(keys, &hp)?;
    let spec = DecoderSpec {
        attention: AttentionSpec {
            names: NAMES,
            scale: Some(scores / (hp.head_dim as f32).sqrt()),
            ..AttentionSpec::PLAIN
        },
        n_dense,
        moe: MoeSpec::from_keys(keys, gating, has_bias, Some(shared))?,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}

/// llama.cpp supports only these values, and a base of 10,000.
fn check_heads(keys: &Keys, hp: &HParams) -> Result<()> {
    let head_dim = hp.n_embd / hp.n_head;
    if hp.head_dim != head_dim {
        let reason = format!("it must be {head_dim}, the width of the model divided by its heads");
        return Err(keys.bad("attention.key_length", hp.head_dim, &reason));
    }
    if hp.n_head_kv != hp.n_head {
        let reason = format!("it must equal the number of heads, {}", hp.n_head);
        return Err(keys.bad("attention.head_count_kv", hp.n_head_kv, &reason));
    }
    if (hp.rope.freq_base - 10_000.0).abs() >= 1e-4 {
        let base = hp.rope.freq_base;
        return Err(keys.bad("rope.freq_base", base, "it must be 10000"));
    }
    Ok(())
}
