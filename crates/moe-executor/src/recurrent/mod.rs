//! Layers with recurrent states instead of attention. [`RecurrentSpec`] contains those of an architecture.

mod short_conv;

pub use short_conv::{ShortConv, ShortConvState};

use crate::hparams::{HParams, LayerCache};

/// The recurrent layers of an architecture.
#[derive(Clone, Copy)]
pub enum RecurrentSpec {
    /// Short convolutions (LFM2).
    ShortConv,
}

impl RecurrentSpec {
    /// Names of the buffers of a pass over `tokens` tokens, and their number of 4-byte values.
    pub(crate) fn buffers(self, hp: &HParams, tokens: u64) -> Vec<(&'static str, u64)> {
        let is_recurrent = |cache: &LayerCache| matches!(cache, LayerCache::State(_));
        if !hp.caches.iter().any(is_recurrent) {
            return Vec::new();
        }
        match self {
            RecurrentSpec::ShortConv => short_conv::buffers(hp.n_embd, tokens),
        }
    }
}
