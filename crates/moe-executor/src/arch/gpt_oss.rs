//! `gpt-oss` (OpenAI).
//!
//! - Attention sinks, and a sliding window in every second layer.
//! - Biases in all projections, the router and the experts.
//! - The expert weights are the softmax over the scores of the selected experts.
//! - SwiGLU with clamped inputs ([`Glu::SwigluOai`]).

use crate::arch::decoder::{Decoder, DecoderSpec, LayerNorm, OutputRows};
use crate::attention::AttentionSpec;
use crate::error::Result;
use crate::hparams::{ExpertWidth, Gating, HParams, Keys, Layout, WindowRules};
use crate::moe::MoeSpec;
use crate::ops::Glu;
use crate::weights::{Bias, Loader};

const SPEC: DecoderSpec = DecoderSpec {
    attention: AttentionSpec {
        qkv_bias: Bias::Required,
        output_bias: Bias::Required,
        sinks: true,
        ..AttentionSpec::PLAIN
    },
    ffn_norm: LayerNorm {
        tensor: "post_attention_norm",
        node: "attn_post_norm",
    },
    moe: MoeSpec {
        gating: Gating::SoftmaxOfSelected,
        glu: Glu::SwigluOai,
        biases: true,
        ..MoeSpec::PLAIN
    },
    output_rows: OutputRows::AfterLastLayer,
    requires_output: true,
    ..DecoderSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let mut hp = HParams::read(keys, Layout::all_moe(ExpertWidth::Own))?;
    hp.read_window(keys, WindowRules::ALTERNATING)?;
    Decoder::load(loader, hp, SPEC)
}
