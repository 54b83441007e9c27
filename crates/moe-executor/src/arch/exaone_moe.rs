//! `exaone-moe` (K-EXAONE, LG AI Research).
//!
//! - RMS norm of queries and keys per head. A sliding window in three of four layers; only these have RoPE.
//! - The first `leading_dense_block_count` layers are dense.
//! - The router uses the function of `expert_gating_func`, with a selection bias if the file has it; the weights of the selected
//!   experts may be normalized and scaled.
//! - A shared expert without a gate.
//! - The blocks of the MTP head are omitted.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, QkNorm, RopeLayers};
use crate::error::Result;
use crate::hparams::{HParams, Keys, Layout, WindowRope, WindowRules};
use crate::moe::{MoeSpec, SharedExpert, SharedWidth};
use crate::weights::Loader;

const ATTENTION: AttentionSpec = AttentionSpec {
    qk_norm: Some(QkNorm::Head),
    rope_factors: true,
    rope_layers: RopeLayers::Windowed,
    ..AttentionSpec::PLAIN
};

const WINDOW: WindowRules = WindowRules {
    period: 4,
    rope: WindowRope::Same,
    ..WindowRules::ALTERNATING
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_dense = keys.n_dense()?;
    let mut hp = HParams::read(keys, Layout::dense_first(n_dense))?;
    hp.read_window(keys, WINDOW)?;
    loader.omit_mtp(hp.n_layer, keys.n_block());
    let shared = SharedExpert::of_key(keys)?;
    let shared = shared.unwrap_or(SharedExpert::of_width(SharedWidth::Experts(1)));
    let has_bias = loader.has_selection_bias(n_dense);
    let spec = DecoderSpec {
        attention: ATTENTION,
        n_dense,
        moe: MoeSpec::from_keys(keys, keys.gating()?, has_bias, Some(shared))?,
        requires_output: true,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
