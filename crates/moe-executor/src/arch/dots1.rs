//! `dots1` (dots.llm1, rednote-hilab).
//!
//! - RMS norm of queries and keys per head.
//! - The first `leading_dense_block_count` layers are dense.
//! - The router uses the function of `expert_gating_func` (sigmoid in the published model), and adds `exp_probs_b` before
//!   the top-k selection.
//! - A shared expert without a gate, `expert_shared_count` times as wide as a routed expert.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, QkNorm};
use crate::error::Result;
use crate::hparams::{HParams, Keys, Layout};
use crate::moe::{MoeSpec, SharedExpert};
use crate::weights::Loader;

const ATTENTION: AttentionSpec = AttentionSpec {
    qk_norm: Some(QkNorm::Head),
    ..AttentionSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_dense = keys.n_dense()?;
    let hp = HParams::read(keys, Layout::dense_first(n_dense))?;
    let shared = SharedExpert::counted(keys, &hp)?;
    let has_bias = loader.has_selection_bias(n_dense);
    let moe = MoeSpec::from_keys(keys, keys.gating()?, has_bias, Some(shared))?;
    let spec = DecoderSpec {
        attention: ATTENTION,
        n_dense,
        moe,
        requires_output: true,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
