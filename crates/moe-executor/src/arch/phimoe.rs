//! `phimoe` (Phi-3.5-MoE, Microsoft).
//!
//! - Norms, output of the attention and logits have biases.
//! - The queries are multiplied by the inverse root of the width of a head.
//! - RoPE with divisors for contexts up to and beyond the original context length, if the file has them.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1.
//! - The experts have the width of `feed_forward_length`.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::AttentionSpec;
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, Rotated};
use crate::moe::MoeSpec;
use crate::weights::{Bias, Loader};

const SPEC: DecoderSpec = DecoderSpec {
    attention: AttentionSpec {
        output_bias: Bias::Required,
        rope_factors: true,
        scale: Some(1.0),
        scales_queries: true,
        ..AttentionSpec::PLAIN
    },
    moe: MoeSpec {
        norm_weights: true,
        ..MoeSpec::PLAIN
    },
    residual_first: true,
    logits_bias: Bias::Required,
    requires_output: true,
    ..DecoderSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let layout = Layout {
        rotated: Rotated::Part,
        longrope: true,
        norm_bias: true,
        ..Layout::all_moe(ExpertWidth::Dense)
    };
    let hp = HParams::read(keys, layout)?;
    Decoder::load(loader, hp, SPEC)
}
