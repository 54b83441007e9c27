//! What the layers of a model keep of earlier tokens.

use super::HParams;

/// What a layer keeps of the earlier tokens of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerCache {
    /// Keys and values of each token. The layer keeps none if it reads those of another layer (`Heads::kv_layer`).
    KeysAndValues,
    /// Keys of each token, whose first elements are also its values (multi-head latent attention).
    Keys,
    /// A recurrent state, whose size does not depend on the number of tokens.
    State(StateShape),
    /// Nothing: the layer has neither attention nor recurrence.
    Nothing,
}

/// Sizes of the recurrent state of a layer, in F32 elements of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateShape {
    /// Channels of the convolution.
    pub channels: usize,
    /// Earlier inputs of the convolution, for each channel: the length of its kernel minus 1.
    pub n_past: usize,
    /// Elements of the state that is updated by each token; 0 in a layer with a convolution only.
    pub state: usize,
}

impl HParams {
    /// Elements of the keys and of the values of a position in the KV cache, by layer; 0 for what a layer does not keep.
    pub fn row_widths(&self) -> Vec<[usize; 2]> {
        let layers = self.layers().zip(self.heads.iter().zip(&self.caches));
        let widths = layers.map(|(il, (heads, cache))| match cache {
            LayerCache::KeysAndValues => heads.cache_widths(il),
            LayerCache::Keys => [heads.n_k(), 0],
            LayerCache::State(_) | LayerCache::Nothing => [0, 0],
        });
        widths.collect()
    }

    /// Whether a layer has a recurrent state.
    pub fn has_states(&self) -> bool {
        let mut caches = self.caches.iter();
        caches.any(|cache| matches!(cache, LayerCache::State(_)))
    }
}

impl StateShape {
    /// Elements of the convolution state.
    pub fn convolution(&self) -> usize {
        self.channels.saturating_mul(self.n_past)
    }

    /// Bytes of both states of one sequence.
    pub fn size_bytes(&self) -> u64 {
        let elements = self.convolution().saturating_add(self.state) as u64;
        elements.saturating_mul(size_of::<f32>() as u64)
    }
}
