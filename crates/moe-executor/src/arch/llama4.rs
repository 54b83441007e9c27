//! `llama4` (Llama 4 Scout and Maverick, Meta).
//!
//! - Attention to chunks of 8,192 positions in three of four layers. The others have no RoPE; their queries are multiplied by a factor
//!   that grows with the position.
//! - RMS norm without weights of rotated queries and keys per head, except in models with 128 experts.
//! - Experts in the last layer of each `interleave_moe_layer_step`; the other layers are dense.
//! - Sigmoid router, whose scores select the experts; the weights are applied to the inputs of the experts. A shared expert.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, QkNorm, RopeLayers, Temperature};
use crate::error::Result;
use crate::hparams::{
    ExpertWidth, Gating, HParams, Keys, Layout, RopeLayout, WindowKind, WindowRules,
};
use crate::moe::{MoeSpec, SharedExpert, SharedWidth};
use crate::weights::Loader;

/// llama.cpp reads no key for the length of a chunk.
const CHUNK: usize = 8192;

const WINDOW: WindowRules = WindowRules {
    period: 4,
    fixed: Some(CHUNK),
    kind: WindowKind::Chunked,
    ..WindowRules::ALTERNATING
};

const ATTENTION: AttentionSpec = AttentionSpec {
    rope_factors: true,
    // llama.cpp reads no key for this period.
    rope_layers: RopeLayers::ExceptLastOf(4),
    temperature: Some(Temperature {
        scale: 0.1,
        length: CHUNK,
        offset: 1,
    }),
    ..AttentionSpec::PLAIN
};

/// Maverick, the only model without norms of queries and keys.
const N_EXPERT_WITHOUT_NORM: usize = 128;

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    refuse_no_chunks(keys)?;
    let moe_step = read_moe_step(keys)?;
    let layout = Layout {
        moe_step,
        ..Layout::all_moe(ExpertWidth::Own)
    };
    let mut hp = HParams::read(keys, layout)?;
    hp.rope.layout = RopeLayout::Neighbours;
    hp.read_window(keys, WINDOW)?;
    let has_norm = hp.n_expert != N_EXPERT_WITHOUT_NORM;
    let spec = DecoderSpec {
        attention: AttentionSpec {
            qk_norm: has_norm.then_some(QkNorm::PlainAfterRope),
            ..ATTENTION
        },
        moe_step,
        moe: MoeSpec {
            gating: Gating::SigmoidOfSelected,
            weights_first: true,
            shared: Some(SharedExpert {
                node: "ffn_moe_shexp",
                ..SharedExpert::of_width(SharedWidth::Experts(1))
            }),
            shared_sum: "ffn_moe_out_merged",
            ..MoeSpec::PLAIN
        },
        output_named_norm: true,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}

/// llama.cpp fails to evaluate a model whose header excludes chunks.
fn refuse_no_chunks(keys: &Keys) -> Result<()> {
    const KEY: &str = "attention.sliding_window";
    match keys.opt_usize(KEY)? {
        Some(0) => Err(keys.bad(KEY, 0, "llama.cpp does not evaluate models without chunks")),
        _ => Ok(()),
    }
}

fn read_moe_step(keys: &Keys) -> Result<usize> {
    const KEY: &str = "interleave_moe_layer_step";
    let step = keys.count(KEY, 1 << 12)?;
    if step > keys.n_block() {
        return Err(keys.bad(KEY, step, "no layer has experts"));
    }
    Ok(step)
}
