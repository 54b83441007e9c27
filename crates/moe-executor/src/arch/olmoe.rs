//! `olmoe` (OLMoE, AI2).
//!
//! - RMS norm of queries and keys over all heads of a token.
//! - Softmax router; its probabilities are the expert weights, without normalization.
//! - The experts have the width of `feed_forward_length`.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, QkNorm};
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout};
use crate::weights::Loader;

const SPEC: DecoderSpec = DecoderSpec {
    attention: AttentionSpec {
        qk_norm: Some(QkNorm::Row),
        ..AttentionSpec::PLAIN
    },
    requires_output: true,
    ..DecoderSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let hp = HParams::read(keys, Layout::all_moe(ExpertWidth::Dense))?;
    Decoder::load(loader, hp, SPEC)
}
