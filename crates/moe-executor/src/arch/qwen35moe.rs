//! `qwen35moe` (Qwen3.5 MoE).
//!
//! Like [`qwen3next`], with these differences:
//!
//! - In the gated delta nets, the heads of values use the heads of queries and keys in turn. Learning rates and decays have matrices of their
//!   own.
//! - M-RoPE, whose positions are the same in all sections of a text. It then rotates like RoPE.

use crate::arch::decoder::{Decoder, DecoderSpec};
use crate::arch::qwen3next;
use crate::attention::{AttentionSpec, GatedQueries};
use crate::cpu::delta_net::KeyHeads;
use crate::error::Result;
use crate::hparams::Keys;
use crate::recurrent::DeltaNetSpec;
use crate::weights::Loader;

pub(crate) fn load<'g>(loader: &Loader<'g>, keys: &Keys) -> Result<Decoder<'g>> {
    let mut hp = qwen3next::read(loader, keys)?;
    refuse_unrotated_sections(keys, hp.rope.n_dims)?;
    let delta_net = DeltaNetSpec {
        heads: qwen3next::read_heads(keys, &mut hp, KeyHeads::InTurn)?,
        joint_inputs: false,
        joint_rates: false,
    };
    let spec = qwen3next::spec(keys, delta_net)?;
    let spec = DecoderSpec {
        embeddings: "model.input_embed",
        attention: AttentionSpec {
            gated_queries: Some(GatedQueries {
                gates: "gate_reshaped",
                names_view: false,
                ..qwen3next::GATED_QUERIES
            }),
            ..spec.attention
        },
        ..spec
    };
    Decoder::load(loader, hp, spec)
}

/// M-RoPE assigns each pair of elements to a section in turn: pair `i` to section `i % 3`, as long as this section has pairs left. The
/// other pairs belong to the fourth section, whose position is 0 in a text, so that it is not rotated. Returns an error if there are such
/// pairs. Source: `ggml_mrope_cache_init` in ggml's `ops.cpp`.
fn refuse_unrotated_sections(keys: &Keys, n_dims: usize) -> Result<()> {
    const KEY: &str = "rope.dimension_sections";
    let sections = keys.list(KEY)?;
    let [time, height, width, _] = sections[..] else {
        let reason = "it must be a list of 4 numbers";
        return Err(keys.bad(KEY, format!("{sections:?}"), reason));
    };
    let n = sections.iter().copied().fold(0, u64::saturating_add);
    let limits = [time, height, width];
    let is_rotated = |pair: u64| {
        let pair = pair.checked_rem(n)?;
        let limit = limits.get(usize::try_from(pair % 3).ok()?)?;
        (pair < limit.saturating_mul(3)).then_some(())
    };
    if (0..n_dims as u64 / 2).all(|pair| is_rotated(pair).is_some()) {
        return Ok(());
    }
    let reason = format!(
        "the first three sections must contain all {} rotated pairs of a head in turn",
        n_dims / 2
    );
    Err(keys.bad(KEY, format!("{sections:?}"), &reason))
}
