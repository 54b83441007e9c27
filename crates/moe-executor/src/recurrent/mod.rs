//! Layers with recurrent states instead of attention. [`RecurrentSpec`] contains those of an architecture.

mod delta_net;
mod kda;
mod mamba2;
mod short_conv;

pub use delta_net::{DeltaNet, DeltaNetSpec, DeltaNetState};
pub use kda::{Kda, KdaState};
pub use mamba2::{Mamba2, Mamba2Spec, Mamba2State};
pub use short_conv::{ShortConv, ShortConvState};

use crate::cpu::delta_net::Heads;
use crate::hparams::HParams;

/// The recurrent layers of an architecture.
#[derive(Clone, Copy)]
pub enum RecurrentSpec {
    /// Short convolutions (LFM2).
    ShortConv,
    /// Gated delta nets (Qwen3-Next, Qwen3.5).
    DeltaNet(DeltaNetSpec),
    /// Kimi Delta Attention, with as many heads of keys as of values.
    Kda(Heads),
    /// Mamba-2.
    Mamba2(Mamba2Spec),
}

impl RecurrentSpec {
    /// Names of the buffers of a pass over `tokens` tokens, and their number of 4-byte values. `has_joint_inputs`: whether a delta net
    /// or a delta attention has all its inputs in one matrix.
    pub(crate) fn buffers(
        self,
        hp: &HParams,
        tokens: u64,
        has_joint_inputs: bool,
    ) -> Vec<(&'static str, u64)> {
        if !hp.has_states() {
            return Vec::new();
        }
        match self {
            RecurrentSpec::ShortConv => short_conv::buffers(hp.n_embd, tokens),
            RecurrentSpec::DeltaNet(spec) => {
                delta_net::buffers(spec, hp.n_embd, tokens, has_joint_inputs)
            }
            RecurrentSpec::Kda(heads) => kda::buffers(heads, hp.n_embd, tokens, has_joint_inputs),
            RecurrentSpec::Mamba2(spec) => spec.buffers(hp.n_embd, tokens),
        }
    }
}
