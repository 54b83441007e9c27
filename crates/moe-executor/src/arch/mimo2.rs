//! `mimo2` (MiMo-V2-Flash, Xiaomi).
//!
//! - The numbers of key and value heads differ between layers, and values have another width than keys. RoPE rotates a part of each
//!   head.
//! - A sliding window in the layers that the header lists; layers may have attention sinks.
//! - The output of the attention may be multiplied by a factor.
//! - The first layers, which have no router, are dense.
//! - Sigmoid router with a selection bias if the file has it; the weights of the selected experts are normalized to a sum of 1.
//! - The blocks of the MTP head are omitted.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::AttentionSpec;
use crate::error::Result;
use crate::hparams::{ExpertWidth, Gating, HParams, Keys, Layout, Rotated, WindowRules};
use crate::moe::MoeSpec;
use crate::weights::{Bias, Loader};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let n_dense = loader.n_without("ffn_gate_inp.weight");
    let layout = Layout {
        n_dense,
        rotated: Rotated::Part,
        heads_by_layer: true,
        own_value_length: true,
        ..Layout::all_moe(ExpertWidth::Own)
    };
    let mut hp = HParams::read(keys, layout)?;
    hp.read_window(keys, WindowRules::LISTED)?;
    loader.omit_mtp(hp.n_layer, keys.n_block());
    let factor = keys.opt_factor("attention.value_scale")?;
    let spec = DecoderSpec {
        attention: AttentionSpec {
            qkv_bias: Bias::None,
            sinks: true,
            optional_sinks: true,
            reshaped: [true, true, false],
            output_scale: factor.filter(|&factor| factor != 1.0),
            ..AttentionSpec::PLAIN
        },
        n_dense,
        moe: MoeSpec {
            gating: Gating::Sigmoid,
            selection_bias: loader.has_selection_bias(n_dense),
            norm_weights: true,
            ..MoeSpec::PLAIN
        },
        requires_output: true,
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
