//! `qwen3next` (Qwen3-Next, Qwen3-Coder-Next).
//!
//! - Three of four layers have a gated delta net instead of attention. Consecutive heads of values use the same head of queries and keys.
//! - The queries contain gates of the heads' output. RMS norm of queries and keys per head; RoPE rotates a part of each head.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1.
//! - A shared expert whose output is multiplied by the sigmoid of a score (`ffn_gate_inp_shexp`).
//! - The rows whose logits are wanted are selected after the norm of the output.
//! - The blocks of the MTP head are omitted.

use crate::arch::decoder::{Decoder, DecoderSpec, LayerNorm, OutputRows};
use crate::attention::{AttentionSpec, GatedQueries, QkNorm};
use crate::cpu::delta_net::{Heads, KeyHeads};
use crate::error::Result;
use crate::hparams::{
    ExpertWidth, HParams, Keys, LayerCache, Layout, MAX_WIDTH, Rotated, StateShape,
};
use crate::moe::{MoeSpec, SharedExpert, SharedWidth};
use crate::recurrent::{DeltaNetSpec, RecurrentSpec};
use crate::weights::Loader;

/// The queries and their gates.
pub(super) const GATED_QUERIES: GatedQueries = GatedQueries {
    product: "Qcur_full",
    gates: "gate",
    names_view: true,
    gated: ["gate_sigmoid", "attn_gated"],
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let mut hp = read(loader, keys)?;
    let delta_net = DeltaNetSpec {
        heads: read_heads(keys, &mut hp, KeyHeads::Grouped)?,
        joint_inputs: true,
        joint_rates: true,
    };
    let spec = spec(keys, delta_net)?;
    Decoder::load(loader, hp, spec)
}

/// Reads the keys of attention and experts, and omits the blocks of the MTP head.
pub(super) fn read(loader: &Loader, keys: &Keys) -> Result<HParams> {
    let layout = Layout {
        rotated: Rotated::Part,
        ..Layout::all_moe(ExpertWidth::OwnOrShare)
    };
    let hp = HParams::read(keys, layout)?;
    loader.omit_mtp(hp.n_layer, keys.n_block());
    Ok(hp)
}

/// Reads the keys of the delta nets: their heads, and the layers that have one.
pub(super) fn read_heads(keys: &Keys, hp: &mut HParams, key_heads: KeyHeads) -> Result<Heads> {
    const INNER: &str = "ssm.inner_size";
    const VALUES: &str = "ssm.time_step_rank";
    const MAX_HEADS: usize = 1 << 14;
    let heads = Heads {
        n_k: keys.count("ssm.group_count", MAX_HEADS)?,
        n_v: keys.count(VALUES, MAX_HEADS)?,
        width: keys.count("ssm.state_size", MAX_HEADS)?,
        keys: key_heads,
    };
    if !heads.n_v.is_multiple_of(heads.n_k) {
        let reason = format!("it must be a multiple of `ssm.group_count`, {}", heads.n_k);
        return Err(keys.bad(VALUES, heads.n_v, &reason));
    }
    let inner = keys.count(INNER, MAX_WIDTH)?;
    if inner != heads.v_width() {
        let reason = format!(
            "it must be the product of `ssm.time_step_rank` and `ssm.state_size`, {}",
            heads.v_width()
        );
        return Err(keys.bad(INNER, inner, &reason));
    }
    let shape = StateShape {
        channels: heads.qkv_width(),
        n_past: keys.convolution_past("ssm.conv_kernel")?,
        state: heads.state(),
    };
    let recurrent = keys.recurrent_layers(hp.n_layer)?;
    for (cache, is_recurrent) in hp.caches.iter_mut().zip(recurrent) {
        if is_recurrent {
            *cache = LayerCache::State(shape);
        }
    }
    Ok(heads)
}

/// The layers of Qwen3-Next and Qwen3.5.
pub(super) fn spec(keys: &Keys, delta_net: DeltaNetSpec) -> Result<DecoderSpec> {
    const SHARED: &str = "expert_shared_feed_forward_length";
    // If the key is missing or 0, the width of the shared expert is `feed_forward_length`.
    let width = if keys.is_set(SHARED)? {
        keys.count(SHARED, MAX_WIDTH)?
    } else {
        keys.count("feed_forward_length", MAX_WIDTH)?
    };
    let shared = SharedExpert {
        gated: true,
        sigmoid: Some([
            "shared_expert_gate",
            "shared_expert_gate_sigmoid",
            "ffn_shexp_gated",
        ]),
        ..SharedExpert::of_width(SharedWidth::Own(width))
    };
    Ok(DecoderSpec {
        embeddings: "model.embed_tokens",
        attention: AttentionSpec {
            output: "attn_output",
            qk_norm: Some(QkNorm::Head),
            reshaped: [false, true, false],
            gated_queries: Some(GATED_QUERIES),
            ..AttentionSpec::PLAIN
        },
        recurrent: Some(RecurrentSpec::DeltaNet(delta_net)),
        ffn_inp: "attn_residual",
        ffn_norm: LayerNorm {
            tensor: "post_attention_norm",
            node: "attn_post_norm",
        },
        moe: MoeSpec {
            norm_weights: true,
            shared: Some(shared),
            ..MoeSpec::PLAIN
        },
        output_rows: OutputRows::AfterNorm,
        output_norm: LayerNorm {
            tensor: "output_norm",
            node: "h_nextn",
        },
        ..DecoderSpec::PLAIN
    })
}
