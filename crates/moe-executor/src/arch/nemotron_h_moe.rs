//! `nemotron_h_moe` (Nemotron 3, NVIDIA).
//!
//! - A layer has one part: experts if its `feed_forward_length` is not 0, otherwise attention if it has key and value heads,
//!   otherwise Mamba-2.
//! - The attention has no RoPE.
//! - Experts without a gate, with a squared ReLU. Their input may have another width, `moe_latent_size`.
//! - Sigmoid router with a selection bias; the weights of the selected experts may be normalized and scaled.
//! - A shared expert without a score.
//! - The output rows are selected after the norm of the output.
//! - The block of the MTP head is omitted.

use crate::arch::decoder::{Decoder, DecoderSpec, LayerNorm, OutputRows};
use crate::attention::{AttentionSpec, RopeLayers};
use crate::error::Result;
use crate::hparams::{ExpertWidth, Gating, HParams, Keys, LayerCache, Layout, MAX_WIDTH, Rotated};
use crate::moe::{MoeSpec, SharedExpert, SharedWidth};
use crate::ops::Unary;
use crate::recurrent::{Mamba2Spec, RecurrentSpec};
use crate::weights::{Bias, Loader};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let layout = Layout {
        rotated: Rotated::Part,
        layers_without_heads: true,
        layers_without_block: true,
        shares_epsilon: true,
        ..Layout::all_moe(ExpertWidth::OwnOrShare)
    };
    let mut hp = HParams::read(keys, layout)?;
    loader.omit_mtp(hp.n_layer, keys.n_block());
    let mamba2 = Mamba2Spec::read(keys)?;
    for (cache, has_block) in hp.caches.iter_mut().zip(&hp.has_block) {
        if *has_block {
            *cache = LayerCache::Nothing;
        } else if *cache == LayerCache::Nothing {
            *cache = LayerCache::State(mamba2.state());
        }
    }
    let shared = keys.count("expert_shared_feed_forward_length", MAX_WIDTH)?;
    let spec = DecoderSpec {
        attention: AttentionSpec {
            output_bias: Bias::Optional,
            rope_layers: RopeLayers::None,
            ..AttentionSpec::PLAIN
        },
        recurrent: Some(RecurrentSpec::Mamba2(mamba2)),
        ffn_norm: LayerNorm::named("attn_norm"),
        output: "nemotron_h_block_out",
        moe: MoeSpec {
            gating: Gating::Sigmoid,
            selection_bias: true,
            norm_weights: keys.bool_or("expert_weights_norm", false)?,
            weights_scale: keys.weights_scale()?,
            ungated: Some(Unary::SquaredRelu),
            latent: latent(loader, keys, &hp)?,
            shared: Some(SharedExpert::of_width(SharedWidth::Own(shared))),
            shared_sum: "l_out",
            ..MoeSpec::PLAIN
        },
        output_rows: OutputRows::AfterNorm,
        output_norm: LayerNorm {
            tensor: "output_norm",
            node: "h_nextn",
        },
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}

/// Width of the input of the experts if it is projected. A file may have projections to the width of the residual stream.
fn latent(loader: &Loader, keys: &Keys, hp: &HParams) -> Result<Option<usize>> {
    const KEY: &str = "moe_latent_size";
    if keys.is_set(KEY)? {
        return Ok(Some(keys.count(KEY, MAX_WIDTH)?));
    }
    let first = hp.has_block.iter().position(|&has_block| has_block);
    let name = format!("blk.{}.ffn_latent_down.weight", first.unwrap_or(0));
    Ok(loader.has(&name).then_some(hp.n_embd))
}
