//! Keys and values of the positions so far.

/// Key-value cache of one sequence, f32. Grows up to its capacity.
pub struct KvCache {
    layers: Vec<Layer>,
    width: usize,
    capacity: usize,
}

/// Rows of one layer, `(position, n_head_kv * head_dim)`.
#[derive(Default)]
pub struct Layer {
    /// Keys.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
}

impl KvCache {
    /// An empty cache for `capacity` positions of `width` elements in each of `n_layer` layers.
    pub fn new(n_layer: usize, width: usize, capacity: usize) -> KvCache {
        let layers = (0..n_layer).map(|_| Layer::default()).collect();
        KvCache {
            layers,
            width,
            capacity,
        }
    }

    /// Positions that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Elements of one position.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Makes place for `n` positions in all layers. Memory is taken in steps that double, not for every token.
    pub fn reserve(&mut self, n: usize) {
        let n = n.min(self.capacity) * self.width;
        for layer in &mut self.layers {
            if layer.k.len() < n {
                let grown = n.max(layer.k.len() * 2).min(self.capacity * self.width);
                layer.k.resize(grown, 0.0);
                layer.v.resize(grown, 0.0);
            }
        }
    }

    /// One layer.
    pub fn layer(&self, il: usize) -> &Layer {
        &self.layers[il]
    }

    /// One layer, to write.
    pub fn layer_mut(&mut self, il: usize) -> &mut Layer {
        &mut self.layers[il]
    }
}
