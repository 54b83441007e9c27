//! `qwen2moe` (Qwen1.5-MoE, Qwen2-MoE).
//!
//! - Biases of queries, keys and values.
//! - Softmax router; its probabilities are the expert weights, without normalization.
//! - A shared expert whose output is multiplied by the sigmoid of a score (`ffn_gate_inp_shexp`).

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::AttentionSpec;
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, MAX_WIDTH};
use crate::moe::{MoeSpec, SharedExpert, SharedWidth};
use crate::weights::Loader;

const ATTENTION: AttentionSpec = AttentionSpec {
    ..AttentionSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    // If the key is missing or 0, the width of the shared expert is `feed_forward_length`.
    let n_ff_shexp = if keys.is_set("expert_shared_feed_forward_length")? {
        keys.count("expert_shared_feed_forward_length", MAX_WIDTH)?
    } else {
        keys.count("feed_forward_length", MAX_WIDTH)?
    };
    let shared = SharedExpert {
        gated: true,
        ..SharedExpert::of_width(SharedWidth::Own(n_ff_shexp))
    };
    let spec = DecoderSpec {
        attention: ATTENTION,
        moe: MoeSpec {
            shared: Some(shared),
            ..MoeSpec::PLAIN
        },
        requires_output: true,
        ..DecoderSpec::PLAIN
    };
    let hp = HParams::read(keys, Layout::all_moe(ExpertWidth::OwnOrShare))?;
    Decoder::load(loader, hp, spec)
}
