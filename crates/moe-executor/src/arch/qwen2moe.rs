//! `qwen2moe`: biases on queries, keys and values; softmax router whose probabilities are the weights; a shared expert
//! with a gate of its own.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::AttentionSpec;
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, MAX_WIDTH};
use crate::moe::{MoeSpec, SharedExpert, SharedWidth};
use crate::weights::Loader;

const ATTENTION: AttentionSpec = AttentionSpec {
    qkv_bias: true,
    ..AttentionSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    // Without a width of its own, or with 0, the shared expert is as wide as a dense block.
    let n_ff_shexp = if keys.is_set("expert_shared_feed_forward_length")? {
        keys.count("expert_shared_feed_forward_length", MAX_WIDTH)?
    } else {
        keys.count("feed_forward_length", MAX_WIDTH)?
    };
    let shared = SharedExpert {
        width: SharedWidth::Own(n_ff_shexp),
        gated: true,
    };
    let spec = DecoderSpec {
        attention: ATTENTION,
        moe: MoeSpec {
            shared: Some(shared),
            ..MoeSpec::PLAIN
        },
        ..DecoderSpec::PLAIN
    };
    let hp = HParams::read(keys, Layout::all_moe(ExpertWidth::OwnOrShare))?;
    Decoder::load(loader, hp, spec)
}
