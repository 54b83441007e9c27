//! `bailingmoe2` (Ling 2 and Ring 2, inclusionAI).
//!
//! - Queries, keys and values in one matrix; RMS norm of queries and keys per head.
//! - RoPE rotates a part of each head.
//! - The first `leading_dense_block_count` layers are dense.
//! - The router uses the function of `expert_gating_func`, and adds `exp_probs_b` before the top-k selection. Experts are selected
//!   from the best groups.
//! - A shared expert without a gate.
//! - The blocks of the MTP head are omitted.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, QkNorm};
use crate::error::Result;
use crate::hparams::{HParams, Keys, Layout, MAX_WIDTH, Rotated};
use crate::moe::{MoeSpec, SharedExpert, SharedWidth};
use crate::weights::Loader;

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_dense = keys.n_dense()?;
    let layout = Layout {
        rotated: Rotated::Part,
        ..Layout::dense_first(n_dense)
    };
    let hp = HParams::read(keys, layout)?;
    loader.omit_mtp(hp.n_layer, keys.n_block());
    let shared = match SharedExpert::of_key(keys)? {
        Some(SharedExpert {
            width: SharedWidth::Own(width),
            ..
        }) => {
            let n = keys.count("expert_shared_count", MAX_WIDTH / width)?;
            SharedExpert::of_width(SharedWidth::Own(n * width))
        }
        _ => SharedExpert::counted(keys, &hp)?,
    };
    let has_bias = loader.has_selection_bias(n_dense);
    let spec = DecoderSpec {
        attention: AttentionSpec {
            qk_norm: Some(QkNorm::Head),
            ..AttentionSpec::PLAIN
        },
        ffn_inp: "sa_out",
        n_dense,
        moe: MoeSpec::from_keys(keys, keys.gating()?, has_bias, Some(shared))?,
        requires_output: true,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
