//! `smallthinker` (SmallThinker, PowerInfer).
//!
//! - The router reads the input of the layer, before the attention; the weights of the selected experts are normalized to a sum
//!   of 1.
//! - Some models have a sliding window of 4,096 positions in three of four layers. In these models, the first of four layers has no
//!   RoPE.
//! - The activation of the experts is a rectifier ([`Glu::Reglu`]).

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::attention::{AttentionSpec, RopeLayers};
use crate::error::Result;
use crate::hparams::{ExpertWidth, HParams, Keys, Layout, WindowRules};
use crate::moe::MoeSpec;
use crate::ops::Glu;
use crate::weights::Loader;

const WINDOW: WindowRules = WindowRules {
    period: 4,
    dense_first: true,
    fixed: Some(4096),
    optional: true,
    ..WindowRules::ALTERNATING
};

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let mut hp = HParams::read(keys, Layout::all_moe(ExpertWidth::Own))?;
    hp.read_window(keys, WINDOW)?;
    let rope_layers = match hp.window {
        Some(_) => RopeLayers::ExceptFirstOf(4),
        None => RopeLayers::All,
    };
    let spec = DecoderSpec {
        attention: AttentionSpec {
            rope_layers,
            ..AttentionSpec::PLAIN
        },
        moe: MoeSpec {
            gating: keys.gating()?,
            norm_weights: true,
            glu: Glu::Reglu,
            sum: "ffn_out",
            routes_ahead: true,
            ..MoeSpec::PLAIN
        },
        ..DecoderSpec::PLAIN
    };
    Decoder::load(loader, hp, spec)
}
