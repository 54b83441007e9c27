//! `step35` (Step 3.5 Flash, StepFun).
//!
//! - The numbers of heads differ between layers. RMS norm of queries and keys per head, if the file has it.
//! - A sliding window in the layers that the header lists. The other layers rotate half of the dimensions, with divisors of the RoPE
//!   frequencies if the file has them.
//! - The output of each head may be multiplied by the sigmoid of a gate.
//! - The first layers, which have no router, are dense.
//! - The router uses the function of `expert_gating_func`, with a selection bias if the file has it; the weights of the selected
//!   experts may be normalized and scaled. A shared expert without a gate.
//! - The activations of layers may have limits.
//! - The blocks of the MTP head are omitted.

use crate::arch::decoder::{Decoder, DecoderSpec, OutputRows, StreamNames};
use crate::attention::{AttentionSpec, Gate, QkNames, QkNorm};
use crate::error::Result;
use crate::hparams::{ExpertWidth, Gating, HParams, Keys, Layout, Rotated, WindowRules};
use crate::moe::{MoeSpec, SharedExpert};
use crate::weights::Loader;

const ATTENTION: AttentionSpec = AttentionSpec {
    output: "attn_proj",
    names: QkNames {
        rotated: ["Qcur_pos", "Kcur_pos"],
        ..QkNames::USUAL
    },
    rope_factors: true,
    rope_factors_in_windows: false,
    reshaped: [true; 3],
    copies_columns: true,
    gate: Some(Gate {
        per_head: true,
        names: ["attn_gate", "attn_gate_sigmoid", "attn_gated_3d"],
    }),
    ..AttentionSpec::PLAIN
};

const WINDOW: WindowRules = WindowRules {
    own_rotation: true,
    ..WindowRules::LISTED
};

/// Smaller limits have no effect in llama.cpp.
const MIN_LIMIT: f32 = 1e-6;

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_dense = loader.n_without("ffn_gate_inp.weight");
    let layout = Layout {
        n_dense,
        rotated: Rotated::Part,
        heads_by_layer: true,
        own_value_length: true,
        longrope: true,
        ..Layout::all_moe(ExpertWidth::Own)
    };
    let mut hp = HParams::read(keys, layout)?;
    hp.read_window(keys, WINDOW)?;
    loader.omit_mtp(hp.n_layer, keys.n_block());
    halve_rotation(keys, &mut hp)?;
    read_limits(keys, &mut hp)?;
    let windowed = hp.window.as_ref().map_or(0, |window| window.rope.n_dims);
    let most_rotated = hp.windowed_layers().map(|is_windowed| {
        if is_windowed {
            windowed
        } else {
            hp.rope.n_dims
        }
    });
    let shared = SharedExpert::of_key(keys)?;
    let shared = shared.map(|shared| SharedExpert {
        node: "ffn_shared_out",
        ..shared
    });
    let spec = DecoderSpec {
        attention: AttentionSpec {
            qk_norm: loader
                .has("blk.0.attn_q_norm.weight")
                .then_some(QkNorm::Head),
            rope_factor_dims: most_rotated.max(),
            ..ATTENTION
        },
        n_dense,
        moe: MoeSpec {
            gating: keys.gating_or(Gating::Sigmoid)?,
            selection_bias: loader.has_selection_bias(n_dense),
            norm_weights: keys.bool_or("expert_weights_norm", false)?,
            weights_scale: keys.weights_scale()?,
            shared,
            ..MoeSpec::PLAIN
        },
        stream_names: StreamNames::Input,
        output_rows: OutputRows::AfterLastLayer,
        requires_output: true,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}

/// Layers without a window rotate half of `rope.dimension_count`.
fn halve_rotation(keys: &Keys, hp: &mut HParams) -> Result<()> {
    let n_dims = hp.rope.n_dims;
    if !n_dims.is_multiple_of(4) {
        let reason = "it must be a multiple of 4";
        return Err(keys.bad("rope.dimension_count", n_dims, reason));
    }
    hp.rope.n_dims = n_dims / 2;
    Ok(())
}

fn read_limits(keys: &Keys, hp: &mut HParams) -> Result<()> {
    let limits = |suffix: &str| -> Result<Vec<Option<f32>>> {
        let limits = keys.f32_by_block(suffix)?.unwrap_or_default();
        let limits = limits.into_iter();
        Ok(limits
            .map(|limit| Some(limit).filter(|&limit| limit > MIN_LIMIT))
            .collect())
    };
    let experts = limits("swiglu_clamp_exp")?;
    let dense = limits("swiglu_clamp_shexp")?;
    for (layer, limits) in hp.swiglu_limits.iter_mut().enumerate() {
        limits.experts = experts.get(layer).copied().flatten();
        limits.dense = dense.get(layer).copied().flatten();
    }
    Ok(())
}
