//! `ernie4_5-moe` (ERNIE 4.5, Baidu).
//!
//! - RoPE of adjacent pairs ([`RopeLayout::Neighbours`]).
//! - The first `leading_dense_block_count` layers are dense.
//! - Softmax router, with a selection bias if the file has it; the weights of the selected experts are normalized to a sum of 1.
//! - A shared expert without a gate, if `expert_shared_feed_forward_length` is set.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::error::Result;
use crate::hparams::{HParams, Keys, Layout, RopeLayout};
use crate::moe::{MoeSpec, SharedExpert};
use crate::weights::Loader;

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    const STEP: &str = "interleave_moe_layer_step";
    let step = keys.usize(STEP)?;
    if step != 1 {
        // llama.cpp loads the experts of the layers between, but its graph has a dense block without tensors there.
        return Err(keys.bad(STEP, step, "the only supported value is 1"));
    }
    let n_dense = keys.n_dense()?;
    let mut hp = HParams::read(keys, Layout::dense_first(n_dense))?;
    hp.rope.layout = RopeLayout::Neighbours;
    let spec = DecoderSpec {
        n_dense,
        moe: MoeSpec {
            selection_bias: loader.has_selection_bias(n_dense),
            norm_weights: true,
            shared: SharedExpert::of_key(keys)?,
            ..MoeSpec::PLAIN
        },
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
