//! `afmoe` (Trinity, Arcee AI).
//!
//! - The embeddings are multiplied by the root of their width.
//! - RMS norm of queries and keys per head. The last of four layers has no RoPE. A sliding window in three of four layers.
//! - The output of the heads is multiplied by the sigmoid of a gate for each element.
//! - Norms before and after attention and block.
//! - The first `leading_dense_block_count` layers are dense.
//! - Sigmoid router with a selection bias; the weights of the selected experts may be normalized and scaled.
//! - Most models have a shared expert without a gate.

use crate::arch::decoder::{Decoder, DecoderSpec, LayerNorm, Scales};
use crate::attention::{AttentionSpec, Gate, QkNames, QkNorm, RopeLayers};
use crate::error::Result;
use crate::hparams::{Gating, HParams, Keys, Layout, Rotated, WindowRope, WindowRules};
use crate::moe::{MoeSpec, SharedExpert};
use crate::weights::Loader;

const ATTENTION: AttentionSpec = AttentionSpec {
    output: "attn_o_proj",
    qk_norm: Some(QkNorm::Head),
    names: QkNames {
        not_rotated: ["Qcur_normed", "Kcur_normed"],
        rotated: ["Qcur_rope", "Kcur_rope"],
        ..QkNames::USUAL
    },
    // llama.cpp reads no key for this period.
    rope_layers: RopeLayers::ExceptLastOf(4),
    gate: Some(Gate {
        per_head: false,
        names: ["attn_gate_proj", "attn_gate_sig", "attn_gated"],
    }),
    ..AttentionSpec::PLAIN
};

const WINDOW: WindowRules = WindowRules {
    period: 4,
    optional: true,
    rope: WindowRope::Own,
    ..WindowRules::ALTERNATING
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_dense = keys.n_dense()?;
    let layout = Layout {
        rotated: Rotated::Part,
        ..Layout::dense_first(n_dense)
    };
    let mut hp = HParams::read(keys, layout)?;
    hp.read_window(keys, WINDOW)?;
    let has_shared = keys.is_set("expert_shared_count")?;
    let shared = has_shared.then(|| SharedExpert::counted(keys, &hp));
    let embedding = (hp.n_embd as f32).sqrt();
    let gating = keys.gating_or(Gating::Sigmoid)?;
    let spec = DecoderSpec {
        attention: ATTENTION,
        post_attention_norm: Some(LayerNorm {
            tensor: "post_attention_norm",
            node: "attn_post_norm",
        }),
        post_ffn_norm: Some(LayerNorm {
            tensor: "post_ffw_norm",
            node: "ffn_post_norm",
        }),
        n_dense,
        moe: MoeSpec::from_keys(keys, gating, true, shared.transpose()?)?,
        scales: Scales {
            embedding: Some((embedding, ["embd", "inp_embd_scaled"])),
            ..Scales::NONE
        },
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
