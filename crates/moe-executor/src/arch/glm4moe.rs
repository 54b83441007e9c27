//! `glm4moe` (GLM-4.5 and later, Z.ai).
//!
//! - Biases of queries, keys and values, and RMS norm of queries and keys per head, if the file has them.
//! - RoPE rotates a part of each head.
//! - The first `leading_dense_block_count` layers are dense.
//! - Sigmoid router with a selection bias; the weights of the selected experts may be normalized and scaled.
//! - A shared expert without a gate, `expert_shared_count` times as wide as a routed expert.
//! - The blocks of the MTP head are omitted.

use crate::arch::decoder::{Decoder, DecoderSpec, LayerNorm};
use crate::attention::{AttentionSpec, QkNorm};
use crate::error::Result;
use crate::hparams::{ExpertWidth, Gating, HParams, Keys, Layout, Rotated};
use crate::moe::{MoeSpec, SharedExpert};
use crate::weights::Loader;

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    refuse_time_sections(keys)?;
    let n_dense = keys.n_dense()?;
    let layout = Layout {
        expert_width: ExpertWidth::OwnOrShare,
        rotated: Rotated::Part,
        ..Layout::dense_first(n_dense)
    };
    let hp = HParams::read(keys, layout)?;
    loader.omit_mtp(hp.n_layer, keys.n_block());
    let shared = SharedExpert {
        node: "ffn_shexp_out",
        ..SharedExpert::counted(keys, &hp)?
    };
    let gating = keys.gating_or(Gating::Sigmoid)?;
    let spec = DecoderSpec {
        attention: AttentionSpec {
            qk_norm: loader
                .has("blk.0.attn_q_norm.weight")
                .then_some(QkNorm::Head),
            ..AttentionSpec::PLAIN
        },
        ffn_norm: LayerNorm {
            tensor: "post_attention_norm",
            node: "post_attn_norm",
        },
        n_dense,
        moe: MoeSpec::from_keys(keys, gating, true, Some(shared))?,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}

/// M-RoPE rotates tokens of a text like RoPE, except dimensions of a fourth section, whose position is 0.
fn refuse_time_sections(keys: &Keys) -> Result<()> {
    const KEY: &str = "rope.dimension_sections";
    let sections = keys.list(KEY)?;
    match sections.get(3) {
        None | Some(0) => Ok(()),
        Some(section) => Err(keys.bad(KEY, section, "the fourth section must be 0")),
    }
}
