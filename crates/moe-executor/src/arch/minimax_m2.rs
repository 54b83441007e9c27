//! `minimax-m2` (MiniMax-M2).
//!
//! - RMS norm of queries and keys over all heads of a token; RoPE rotates a part of each head.
//! - The router uses the function of `expert_gating_func` with a selection bias; the weights of the selected experts are
//!   normalized to a sum of 1.
//! - The experts have the width of `feed_forward_length`.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, QkNorm};
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, Rotated};
use crate::moe::MoeSpec;
use crate::weights::Loader;

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let layout = Layout {
        rotated: Rotated::Part,
        ..Layout::all_moe(ExpertWidth::Dense)
    };
    let hp = HParams::read(keys, layout)?;
    let spec = DecoderSpec {
        attention: AttentionSpec {
            qk_norm: Some(QkNorm::Row),
            ..AttentionSpec::PLAIN
        },
        moe: MoeSpec {
            gating: keys.gating()?,
            selection_bias: true,
            norm_weights: true,
            ..MoeSpec::PLAIN
        },
        requires_output: true,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
