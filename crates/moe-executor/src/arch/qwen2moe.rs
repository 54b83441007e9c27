//! `qwen2moe`: biases on queries, keys and values; softmax router whose probabilities are the weights; a shared expert
//! with a gate of its own.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::AttentionSpec;
use crate::error::Result;
use crate::hparams::{HParams, Keys, MAX_WIDTH};
use crate::moe::{MoeSpec, SharedExpert};
use crate::weights::Loader;

const ATTENTION: AttentionSpec = AttentionSpec {
    qkv_bias: true,
    ..AttentionSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_ff_shexp = match keys.opt_usize("expert_shared_feed_forward_length")? {
        Some(_) => keys.count("expert_shared_feed_forward_length", MAX_WIDTH)?,
        None => keys.count("feed_forward_length", MAX_WIDTH)?,
    };
    let shared = SharedExpert {
        n_ff: n_ff_shexp,
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
    let hp = HParams::read(keys, keys.expert_width()?)?;
    Decoder::load(loader, hp, spec)
}
