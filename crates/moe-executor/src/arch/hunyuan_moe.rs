//! `hunyuan-moe` (Hunyuan-A13B, Tencent).
//!
//! - RMS norm of queries and keys per head, after RoPE.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1.
//! - A shared expert without a gate.
//! - The experts have the width of `feed_forward_length`, and the shared expert too unless
//!   `expert_shared_feed_forward_length` is set.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, QkNames, QkNorm};
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout};
use crate::moe::{MoeSpec, SharedExpert, SharedWidth};
use crate::weights::Loader;

const ATTENTION: AttentionSpec = AttentionSpec {
    qk_norm: Some(QkNorm::HeadAfterRope),
    names: QkNames {
        normed: ["Qcur_norm", "Kcur_norm"],
        ..QkNames::USUAL
    },
    ..AttentionSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let hp = HParams::read(keys, Layout::all_moe(ExpertWidth::Dense))?;
    let shared = SharedExpert::of_key(keys)?;
    let shared = shared.unwrap_or(SharedExpert::of_width(SharedWidth::Experts(1)));
    let spec = DecoderSpec {
        attention: ATTENTION,
        moe: MoeSpec {
            norm_weights: true,
            shared: Some(SharedExpert {
                node: "ffn_mlp",
                ..shared
            }),
            ..MoeSpec::PLAIN
        },
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
