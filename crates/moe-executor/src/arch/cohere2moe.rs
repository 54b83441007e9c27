//! `cohere2moe` (Command A MoE, Cohere).
//!
//! - Attention and block read the same normed input, and are added to the residual stream together. The norm is a layer norm without
//!   bias, or an RMS norm.
//! - A sliding window in three of four layers. These layers and the dense ones have RoPE of adjacent pairs ([`RopeLayout::Neighbours`]).
//! - The first `leading_dense_block_count` layers are dense.
//! - The router uses the function of `expert_gating_func`; the weights of the selected experts may be normalized and scaled. Each expert
//!   may have a factor.
//! - A model may have a shared expert: the output is the mean of the selected experts and the shared expert.
//! - A factor on the logits. The blocks of the MTP head are omitted.

use crate::arch::decoder::{Decoder, DecoderSpec, LayerNorm, OutputRows, Scales};
use crate::attention::{AttentionSpec, RopeLayers};
use crate::error::Result;
use crate::hparams::{
    ExpertWidth, Gating, HParams, Keys, Layout, NormKind, RopeLayout, WindowRope, WindowRules,
};
use crate::moe::{MoeSpec, SharedExpert};
use crate::weights::Loader;

const WINDOW: WindowRules = WindowRules {
    period: 4,
    dense_first: true,
    rope: WindowRope::Same,
    ..WindowRules::ALTERNATING
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_dense = keys.n_dense()?;
    let rms_epsilon = keys.f32_or("attention.layer_norm_rms_epsilon", 0.0)?;
    let layout = Layout {
        n_dense,
        norm: if rms_epsilon == 0.0 {
            NormKind::Layer
        } else {
            NormKind::Rms
        },
        ..Layout::all_moe(ExpertWidth::OwnOrDense)
    };
    let mut hp = HParams::read(keys, layout)?;
    hp.rope.layout = RopeLayout::Neighbours;
    hp.read_window(keys, WINDOW)?;
    loader.omit_mtp(hp.n_layer, keys.n_block());
    let logits = Some(keys.f32("logit_scale")?).filter(|&scale| scale != 0.0);
    let n_dense_u32 = u32::try_from(n_dense).unwrap_or(u32::MAX);
    let spec = DecoderSpec {
        attention: AttentionSpec {
            rope_layers: RopeLayers::WindowedAndFirst(n_dense_u32),
            ..AttentionSpec::PLAIN
        },
        n_dense,
        moe: MoeSpec {
            gating: keys.gating_or(Gating::Sigmoid)?,
            norm_weights: keys.bool_or("expert_weights_norm", false)?,
            weights_scale: keys.weights_scale()?,
            expert_scales: true,
            shared: read_shared(keys, &hp)?,
            shared_scale: Some(0.5),
            ..MoeSpec::PLAIN
        },
        parallel: true,
        output_rows: OutputRows::AfterNorm,
        output_norm: LayerNorm {
            tensor: "output_norm",
            node: "h_nextn",
        },
        scales: Scales {
            logits,
            ..Scales::NONE
        },
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}

fn read_shared(keys: &Keys, hp: &HParams) -> Result<Option<SharedExpert>> {
    if !keys.is_set("expert_shared_count")? {
        return Ok(None);
    }
    match SharedExpert::of_key(keys)? {
        Some(shared) => Ok(Some(shared)),
        None => SharedExpert::counted(keys, hp).map(Some),
    }
}
