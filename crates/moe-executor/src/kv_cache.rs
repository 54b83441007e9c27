//! The key-value cache.

use moe_trace::LayerId;
use moe_trace::buffers::{Buffer, usage};

use crate::buffers::Inventory;
use crate::cuda;
use crate::mirrored::Mirrored;

/// Key-value cache of one sequence in f32. Its memory grows up to its capacity.
pub struct KvCache {
    layers: Vec<KvLayer>,
    width: usize,
    capacity: usize,
}

/// Cache of one layer.
#[derive(Default)]
pub struct KvLayer {
    /// Keys `(position, n_head_kv * head_dim)`.
    pub k: Mirrored<f32>,
    /// Values `(position, n_head_kv * head_dim)`.
    pub v: Mirrored<f32>,
}

impl KvCache {
    /// An empty cache for `capacity` positions of `width` elements in each of `n_layer` layers.
    pub fn new(n_layer: usize, width: usize, capacity: usize) -> KvCache {
        let layers = (0..n_layer).map(|_| KvLayer::default()).collect();
        KvCache {
            layers,
            width,
            capacity,
        }
    }

    /// Maximum number of positions.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Elements of one position.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Reserves memory for `n` positions in all layers. The size doubles at each step, so decoded tokens rarely allocate.
    ///
    /// # Errors
    /// Keys or values cannot be moved from a GPU that has no memory for the larger size.
    pub fn reserve(&mut self, n: usize) -> cuda::Result<()> {
        let n = n.min(self.capacity) * self.width;
        for layer in &mut self.layers {
            let held = layer.k.len();
            if held < n {
                let grown = n.max(held * 2).min(self.capacity * self.width);
                layer.k.grow(grown)?;
                layer.v.grow(grown)?;
            }
        }
        Ok(())
    }

    /// Positions with reserved memory, the same in all layers.
    pub(crate) fn reserved(&self) -> usize {
        let elements = self.layers.first().map_or(0, |layer| layer.k.len());
        elements / self.width.max(1)
    }

    /// Adds its buffers to an inventory, under their names in the trace.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        for (il, layer) in (0..).map(LayerId).zip(&self.layers) {
            for (half, (stem, data)) in [("k", &layer.k), ("v", &layer.v)].into_iter().enumerate() {
                let on_host = Buffer {
                    buffer_id: KvCache::buffer_id(il, half),
                    buffer_ptr: data.cpu_memory().as_ptr() as u64,
                    size: (data.cpu_memory().capacity() * size_of::<f32>()) as u64,
                    name: format!("cache_{stem}_l{il}"),
                    backend: "CPU".to_owned(),
                    usage: usage::ANY,
                    layer: Some(il),
                };
                inventory.gpu_copies(&on_host, data.gpu_memory());
                inventory.add(on_host);
            }
        }
    }

    /// Buffer id of a layer's keys (`half` 0) or values (`half` 1), above the ids of the activations.
    pub(crate) fn buffer_id(il: LayerId, half: usize) -> u64 {
        const FIRST: u64 = 1 << 16;
        FIRST + (il.index() * 2 + half) as u64
    }

    /// The cache of one layer, mutable.
    pub fn layer_mut(&mut self, il: LayerId) -> &mut KvLayer {
        &mut self.layers[il.index()]
    }
}
