//! The key-value cache: the keys and values of several sequences.

mod params;
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
use crate::hparams::HParams;

pub use params::{CacheParams, CacheType, UnknownCacheType};
pub(crate) use tensor::CacheTensor;

/// Key-value cache of several sequences. Its memory grows up to its capacity.
///
/// Row `position * n_seq + sequence` of a layer's keys or values is that of a position of a sequence. Therefore growth keeps
/// the rows in place, and a sequence is a view with a constant stride.
pub(crate) struct KvCache {
    layers: Vec<KvLayer>,
    params: CacheParams,
    /// Elements of a row of keys and of values, by layer.
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
    /// Values.
    pub v: CacheTensor,
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
        KvCache::with_widths(hp.cache_widths().collect(), params)
    }

    /// An empty cache with rows of `widths` elements: keys and values, by layer.
    fn with_widths(widths: Vec<[usize; 2]>, params: CacheParams) -> KvCache {
        let params = CacheParams {
            n_seq: params.n_seq.max(1),
            ..params
        };
        let layer = |&[k, v]: &[usize; 2]| KvLayer {
            k: CacheTensor::new(params.k, k),
            v: CacheTensor::new(params.v, v),
        };
        KvCache {
            layers: widths.iter().map(layer).collect(),
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

    /// Removes all positions of a sequence from `n` on.
    pub fn truncate(&mut self, sequence: usize, n: usize) {
        if let Some(length) = self.lengths.get_mut(sequence) {
            *length = n.min(*length);
        }
    }

    /// Starts a pass whose tokens follow the positions of their sequences, and reserves memory: the longest sequence has
    /// `n_positions` positions after the pass.
    ///
    /// # Errors
    /// There is no memory for the larger size.
    pub fn begin_pass(
        &mut self,
        runs: impl IntoIterator<Item = Run>,
        n_positions: usize,
    ) -> Result<()> {
        self.runs.clear();
        self.runs.extend(runs);
        self.reserve(n_positions)
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
        let widths = self.widths.iter().copied();
        let bytes = self.params.bytes(widths, positions);
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
                let words = data.words.cpu_memory();
                let on_host = Buffer {
                    buffer_id: KvCache::buffer_id(il, half),
                    buffer_ptr: words.as_ptr() as u64,
                    size: size_of_val(words.as_slice()) as u64,
                    name: format!("cache_{stem}_l{il}"),
                    backend: "CPU".to_owned(),
                    usage: usage::ANY,
                    layer: Some(il),
                };
                inventory.gpu_copies(&on_host, data.words.gpu_memory());
                inventory.add(on_host);
            }
        }
    }

    /// Buffer id of a layer's keys (`half` 0) or values (`half` 1), above the ids of the activations.
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
}
