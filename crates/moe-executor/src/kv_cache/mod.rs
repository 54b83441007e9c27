//! The cache of a session: the keys and values, or the recurrent states, of several sequences.

mod params;
mod state;
mod tensor;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::ops::Range;

use moe_trace::LayerId;
use moe_trace::buffers::{Buffer, usage};

use crate::buffers::Inventory;
use crate::error::{Error, Result};
use crate::hparams::{HParams, LayerCache};
use crate::mirrored::{Mirrored, Plain};

pub use params::{CacheParams, CacheType, UnknownCacheType};
pub(crate) use state::LayerState;
pub(crate) use tensor::CacheTensor;

/// Cache of several sequences. The memory of keys and values grows up to its capacity; that of recurrent states is constant. A layer
/// has either of them, or none.
///
/// Row `position * n_seq + sequence` of a layer's keys or values is that of a position of a sequence. Therefore growth keeps
/// the rows in place, and a sequence is a view with a constant stride.
pub(crate) struct KvCache {
    /// Keys and values of each layer; their rows are empty in a layer that does not keep them.
    layers: Vec<KvLayer>,
    /// Recurrent states of the layers that have them.
    states: Vec<Option<LayerState>>,
    params: CacheParams,
    /// Elements of a row of keys and of values, by layer; 0 for what a layer does not keep.
    widths: Vec<[usize; 2]>,
    /// Positions with reserved memory, the same in all layers.
    reserved: usize,
    /// Number of positions of each sequence.
    lengths: Vec<usize>,
    /// The tokens of the current pass by sequence.
    runs: Vec<Run>,
}

/// Cache of one layer.
pub(crate) struct KvLayer {
    /// Keys.
    pub k: CacheTensor,
    /// Values. Without them, the first elements of the keys are the values.
    pub v: CacheTensor,
}

impl KvLayer {
    /// Whether the values are the first elements of the keys.
    pub fn has_values_in_keys(&self) -> bool {
        self.v.width() == 0
    }

    /// The rows that contain the values.
    pub fn values(&self) -> &CacheTensor {
        if self.has_values_in_keys() {
            &self.k
        } else {
            &self.v
        }
    }
}

/// Consecutive tokens of a pass that belong to the same sequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    /// The sequence.
    pub sequence: usize,
    /// Indices of the tokens in the pass.
    pub tokens: Range<usize>,
}

/// The tokens of a pass in a cache.
#[derive(Clone, Copy)]
pub(crate) struct Batch<'a> {
    /// Position of each token in its sequence.
    pub positions: &'a [u32],
    /// The sequences of the tokens.
    pub runs: &'a [Run],
    /// Number of sequences in the cache.
    pub n_seq: usize,
}

impl KvCache {
    /// An empty cache for a model.
    pub fn new(hp: &HParams, params: CacheParams) -> KvCache {
        KvCache::with_shape(&hp.caches, hp.row_widths(), params)
    }

    /// An empty cache for `layers`, with rows of `widths` elements (keys, values).
    fn with_shape(layers: &[LayerCache], widths: Vec<[usize; 2]>, params: CacheParams) -> KvCache {
        let params = CacheParams {
            n_seq: params.n_seq.max(1),
            ..params
        };
        let kv_layer = |&[k, v]: &[usize; 2]| KvLayer {
            k: CacheTensor::new(params.k, k),
            v: CacheTensor::new(params.v, v),
        };
        let state = |layer: &LayerCache| match layer {
            LayerCache::State(shape) => Some(LayerState::new(*shape)),
            LayerCache::KeysAndValues | LayerCache::Keys | LayerCache::Nothing => None,
        };
        KvCache {
            layers: widths.iter().map(kv_layer).collect(),
            states: layers.iter().map(state).collect(),
            params,
            widths,
            reserved: 0,
            lengths: vec![0; params.n_seq],
            runs: Vec::new(),
        }
    }

    /// Maximum number of positions of a sequence.
    pub fn capacity(&self) -> usize {
        self.params.n_ctx
    }

    /// Number of sequences.
    pub fn n_seq(&self) -> usize {
        self.params.n_seq
    }

    /// Number of positions of a sequence; 0 if the sequence does not exist.
    pub fn len(&self, sequence: usize) -> usize {
        self.lengths.get(sequence).copied().unwrap_or(0)
    }

    /// Removes all positions of a sequence. Its recurrent states are reset when it continues.
    pub fn clear(&mut self, sequence: usize) {
        if let Some(length) = self.lengths.get_mut(sequence) {
            *length = 0;
        }
    }

    /// Removes all positions of a sequence from `n` on.
    ///
    /// # Errors
    /// [`Error::TruncatedState`] if the sequence would keep some of its positions, and the model has recurrent states: they cannot
    /// be rewound.
    pub fn truncate(&mut self, sequence: usize, n: usize) -> Result<()> {
        let n_past = self.len(sequence);
        if (1..n_past).contains(&n) && self.states.iter().any(Option::is_some) {
            return Err(Error::TruncatedState {
                slot: sequence,
                n_past,
                n,
            });
        }
        if let Some(length) = self.lengths.get_mut(sequence) {
            *length = n.min(*length);
        }
        Ok(())
    }

    /// Starts a pass whose tokens follow the positions of their sequences, and reserves memory: the longest sequence has
    /// `n_positions` positions after the pass. Resets the recurrent states of sequences without positions.
    ///
    /// A pass updates the states, so it must not run twice.
    ///
    /// # Errors
    /// There is no memory for the larger size, or a GPU fails.
    pub fn begin_pass(
        &mut self,
        runs: impl IntoIterator<Item = Run>,
        n_positions: usize,
    ) -> Result<()> {
        self.runs.clear();
        self.runs.extend(runs);
        self.allocate_states()?;
        for run in &self.runs {
            if self.lengths.get(run.sequence) == Some(&0) {
                for state in self.states.iter_mut().flatten() {
                    state.clear(run.sequence)?;
                }
            }
        }
        self.reserve(n_positions)
    }

    /// Allocates the recurrent states of all sequences, unless they are allocated.
    fn allocate_states(&mut self) -> Result<()> {
        let n_seq = self.params.n_seq;
        let states = self.states.iter().flatten();
        let bytes = states.fold(0u64, |sum, state| {
            sum.saturating_add(state.shape().size_bytes())
        });
        for state in self.states.iter_mut().flatten() {
            state.try_reserve(n_seq).map_err(|_| Error::StateMemory {
                bytes: bytes.saturating_mul(n_seq as u64),
                n_seq,
            })?;
            state.allocate(n_seq);
        }
        Ok(())
    }

    /// Ends a pass: its tokens are positions of their sequences.
    pub fn end_pass(&mut self) {
        for run in &self.runs {
            if let Some(length) = self.lengths.get_mut(run.sequence) {
                *length += run.tokens.len();
            }
        }
    }

    /// Reserves memory for `n` positions of each sequence in all layers. The size doubles at each step, so decoded tokens rarely
    /// allocate.
    fn reserve(&mut self, n: usize) -> Result<()> {
        let n = n.min(self.capacity());
        if n <= self.reserved {
            return Ok(());
        }
        let limit = self.params.n_positions.clamp(n, self.capacity().max(n));
        let positions = n.max(self.reserved * 2).min(limit);
        let rows = positions.saturating_mul(self.n_seq());
        let bytes = self.params.bytes(&self.widths, positions);
        for layer in &mut self.layers {
            for half in [&mut layer.k, &mut layer.v] {
                half.try_reserve(rows).map_err(|_| Error::CacheMemory {
                    bytes,
                    n_positions: positions,
                    n_seq: self.params.n_seq,
                })?;
            }
        }
        for layer in &mut self.layers {
            layer.k.grow(rows)?;
            layer.v.grow(rows)?;
        }
        self.reserved = positions;
        Ok(())
    }

    /// Positions with reserved memory, the same in all layers.
    pub fn reserved(&self) -> usize {
        self.reserved
    }

    /// Adds its buffers to an inventory, under their names in the trace.
    pub fn buffers(&self, inventory: &mut Inventory) {
        for (il, layer) in (0..).map(LayerId).zip(&self.layers) {
            for (half, (stem, data)) in [("k", &layer.k), ("v", &layer.v)].into_iter().enumerate() {
                add_buffer(inventory, (il, half), stem, &data.words);
            }
        }
        for (il, state) in (0..).map(LayerId).zip(&self.states) {
            if let Some(state) = state {
                add_buffer(inventory, (il, 0), "r", &state.convolution);
                add_buffer(inventory, (il, 1), "s", &state.state);
            }
        }
    }

    /// Buffer id of a layer's keys or convolution states (`half` 0), or of its values or states (`half` 1), above the ids of the
    /// activations.
    pub fn buffer_id(il: LayerId, half: usize) -> u64 {
        const FIRST: u64 = 1 << 16;
        FIRST + (il.index() * 2 + half) as u64
    }

    /// The sequences of the current pass, and the cache of one layer, mutable.
    pub fn layer_mut(&mut self, il: LayerId) -> (&[Run], &mut KvLayer) {
        (&self.runs, &mut self.layers[il.index()])
    }

    /// The sequences of the current pass, and a layer's keys (`half` 0) or values (`half` 1), mutable.
    pub fn half_mut(&mut self, il: LayerId, half: usize) -> (&[Run], &mut CacheTensor) {
        let (runs, layer) = self.layer_mut(il);
        let tensor = if half == 0 {
            &mut layer.k
        } else {
            &mut layer.v
        };
        (runs, tensor)
    }

    /// The sequences of the current pass, and the recurrent states of a layer, mutable. The runs of a sequence follow the order of its
    /// positions. A sequence that starts in the pass has states of 0.
    ///
    /// # Panics
    /// If the layer has no recurrent states.
    pub fn state_mut(&mut self, il: LayerId) -> (&[Run], &mut LayerState) {
        let state = self.states[il.index()].as_mut();
        (&self.runs, state.expect("the layer is recurrent"))
    }
}

/// Adds the buffer of a layer under its name in the trace.
fn add_buffer<T: Plain>(
    inventory: &mut Inventory,
    (il, half): (LayerId, usize),
    stem: &str,
    values: &Mirrored<T>,
) {
    let on_cpu = values.cpu_memory();
    let on_host = Buffer {
        buffer_id: KvCache::buffer_id(il, half),
        buffer_ptr: on_cpu.as_ptr() as u64,
        size: size_of_val(on_cpu.as_slice()) as u64,
        name: format!("cache_{stem}_l{il}"),
        backend: "CPU".to_owned(),
        usage: usage::ANY,
        layer: Some(il),
    };
    inventory.gpu_copies(&on_host, values.gpu_memory());
    inventory.add(on_host);
}
