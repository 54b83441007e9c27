//! `mellum` (Mellum 2, JetBrains).
//!
//! - RMS norm of queries and keys per head.
//! - A sliding window in three of four layers, with RoPE without context scaling.
//! - Softmax router; the weights of the selected experts are normalized to a sum of 1.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, QkNorm};
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, WindowRope, WindowRules};
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
    requires_output: true,
    ..DecoderSpec::PLAIN
};

const WINDOW: WindowRules = WindowRules {
    period: 4,
    optional: true,
    rope: WindowRope::Unscaled,
    ..WindowRules::ALTERNATING
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let mut hp = HParams::read(keys, Layout::all_moe(ExpertWidth::OwnOrShare))?;
    hp.read_window(keys, WINDOW)?;
    Decoder::load(loader, hp, SPEC)
}
