//! `llama` with experts (Mixtral): the plainest attention, rotated in neighbouring pairs; softmax router with normalised
//! weights.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::AttentionSpec;
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, RopeLayout};
use crate::moe::MoeSpec;
use crate::weights::Loader;

const SPEC: DecoderSpec = DecoderSpec {
    attention: AttentionSpec {
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
