//! `llama` with experts (Mixtral).
//!
//! - RoPE of adjacent pairs ([`RopeLayout::Neighbours`]), with the divisors of `rope_freqs.weight` if the file has them.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1.
//! - The experts have the width of `feed_forward_length`.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::AttentionSpec;
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, RopeLayout};
use crate::moe::MoeSpec;
use crate::weights::{Bias, Loader};

const SPEC: DecoderSpec = DecoderSpec {
    attention: AttentionSpec {
        output_bias: Bias::Optional,
        rope_factors: true,
        ..AttentionSpec::PLAIN
    },
    moe: MoeSpec {
        norm_weights: true,
        ..MoeSpec::PLAIN
    },
    ..DecoderSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let mut hp = HParams::read(keys, Layout::all_moe(ExpertWidth::Dense))?;
    hp.rope.layout = RopeLayout::Neighbours;
    Decoder::load(loader, hp, SPEC)
}
