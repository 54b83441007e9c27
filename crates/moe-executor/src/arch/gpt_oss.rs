//! `gpt-oss`: attention with sinks, a sliding window in every other layer, biases everywhere, softmax over the scores of
//! the chosen experts, clamped SwiGLU.

use crate::arch::decoder::{Cut, Decoder, DecoderSpec};
use crate::attention::AttentionSpec;
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout};
use crate::moe::MoeSpec;
use crate::ops::{Gating, Glu};
use crate::weights::Loader;

const SPEC: DecoderSpec = DecoderSpec {
    attention: AttentionSpec {
        qkv_bias: true,
        output_bias: true,
        sinks: true,
        ..AttentionSpec::PLAIN
    },
    ffn_norm: ("post_attention_norm", "attn_post_norm"),
    moe: MoeSpec {
        gating: Gating::SoftmaxOfChosen,
        glu: Glu::SwigluOai,
        biases: true,
        ..MoeSpec::PLAIN
    },
    cut: Cut::BehindLastLayer,
    ..DecoderSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let mut hp = HParams::read(keys, Layout::all_moe(ExpertWidth::Own))?;
    hp.read_window(keys)?;
    Decoder::load(loader, hp, SPEC)
}
