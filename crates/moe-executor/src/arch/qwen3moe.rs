//! `qwen3moe` (Qwen3-MoE).
//!
//! - RMS norm of queries and keys per head.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, QkNorm};
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout};
use crate::moe::MoeSpec;
use crate::weights::Loader;

const SPEC: DecoderSpec = DecoderSpec {
    attention: AttentionSpec {
        qk_norm: Some(QkNorm::Head),
        ..AttentionSpec::PLAIN
    },
    moe: MoeSpec {
        norm_weights: true,
        ..MoeSpec::PLAIN
    },
    ..DecoderSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let hp = HParams::read(keys, Layout::all_moe(ExpertWidth::OwnOrShare))?;
    Decoder::load(loader, hp, SPEC)
}
