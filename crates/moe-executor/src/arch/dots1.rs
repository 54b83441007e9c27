//! `dots1`: queries and keys normed head by head, dense layers first, a router of sigmoids with a bias on the choice, and
//! a shared expert.

use crate::arch::decoder::{Decoder, DecoderSpec, DenseLead};
use crate::attention::{AttentionSpec, QkNorm};
use crate::error::Result;
use crate::hparams::{HParams, Keys, MAX_WIDTH};
use crate::moe::{MoeSpec, SharedExpert};
use crate::weights::Loader;

const ATTENTION: AttentionSpec = AttentionSpec {
    qk_norm: Some(QkNorm::Head),
    ..AttentionSpec::PLAIN
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let hp = HParams::read(keys, keys.count("expert_feed_forward_length", MAX_WIDTH)?)?;
    let dense = DenseLead {
        n_layer: keys.opt_usize("leading_dense_block_count")?.unwrap_or(0),
        n_ff: keys.count("feed_forward_length", MAX_WIDTH)?,
    };
    let n_shared = keys.count("expert_shared_count", MAX_WIDTH / hp.n_ff_exp)?;
    let shared = SharedExpert {
        n_ff: hp.n_ff_exp * n_shared,
        gated: false,
    };
    let moe = MoeSpec {
        gating: keys.gating()?,
        selection_bias: loader.has(&format!("blk.{}.exp_probs_b.bias", dense.n_layer)),
        norm_weights: keys.bool_or("expert_weights_norm", false)?,
        weights_scale: keys.weights_scale()?,
        shared: Some(shared),
        ..MoeSpec::PLAIN
    };
    let spec = DecoderSpec {
        attention: ATTENTION,
        dense,
        moe,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
