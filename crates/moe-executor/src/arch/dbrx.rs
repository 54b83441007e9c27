//! `dbrx` (DBRX, Databricks).
//!
//! - Layer norms without biases.
//! - Queries, keys and values in one matrix, limited to `attention.clamp_kqv`.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1.
//! - The experts have the width of `feed_forward_length`.

use crate::arch::decoder::{Decoder, DecoderSpec, LayerNorm};
use crate::attention::AttentionSpec;
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, NormKind};
use crate::moe::MoeSpec;
use crate::weights::Loader;

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let layout = Layout {
        norm: NormKind::Layer,
        ..Layout::all_moe(ExpertWidth::Dense)
    };
    let hp = HParams::read(keys, layout)?;
    let limit = keys.f32("attention.clamp_kqv")?;
    let spec = DecoderSpec {
        attention: AttentionSpec {
            clamp: (limit > 0.0).then_some(limit),
            ..AttentionSpec::PLAIN
        },
        ffn_norm: LayerNorm {
            tensor: "attn_output_norm",
            node: "attn_out_norm",
        },
        moe: MoeSpec {
            norm_weights: true,
            ..MoeSpec::PLAIN
        },
        requires_output: true,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
