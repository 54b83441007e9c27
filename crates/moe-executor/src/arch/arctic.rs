//! `arctic` (Snowflake Arctic).
//!
//! - RoPE of adjacent pairs ([`RopeLayout::Neighbours`]).
//! - Each layer has a dense block of the width of the residual stream after the attention. The experts read the input of the layer.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1.
//! - The experts have the width of `feed_forward_length`.

use crate::arch::decoder::{Decoder, DecoderSpec, DenseBlock};
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, RopeLayout};
use crate::moe::MoeSpec;
use crate::weights::Loader;

const SPEC: DecoderSpec = DecoderSpec {
    moe: MoeSpec {
        norm_weights: true,
        ..MoeSpec::PLAIN
    },
    dense_block: DenseBlock::BeforeExperts,
    ..DecoderSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let mut hp = HParams::read(keys, Layout::all_moe(ExpertWidth::Dense))?;
    hp.rope.layout = RopeLayout::Neighbours;
    Decoder::load(loader, hp, SPEC)
}
