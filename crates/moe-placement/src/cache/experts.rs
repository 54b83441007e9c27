//! Dense numbering of the experts of a model.

use std::ops::Range;

use moe_ids::{ExpertId, LayerId, MAX_ID};

use crate::plan::ExpertSizes;

/// Number of an expert in [`Experts`]: 0 to [`Experts::len`] - 1.
pub type Key = u32;

/// All experts of a model with their sizes. Keys ascend by layer, then by expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    layers: Vec<LayerKeys>,
    /// `[n_keys]`: index in `layers`, expert, bytes.
    experts: Vec<(u32, ExpertId, u64)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct LayerKeys {
    /// Block number in the model.
    layer: LayerId,
    first: Key,
    /// `[max expert id + 1]`: key of each expert; `None` if the model lacks the expert.
    keys: Vec<Option<Key>>,
}

impl Experts {
    /// Numbers all experts in `sizes`.
    pub fn new(sizes: &ExpertSizes) -> Experts {
        let mut experts = Experts {
            layers: Vec::new(),
            experts: Vec::new(),
        };
        let possible = sizes.iter().filter(|&(_, expert, _)| expert.0 < MAX_ID);
        for ((layer, expert, bytes), key) in possible.zip(0..) {
            if experts.layers.last().is_none_or(|last| last.layer != layer) {
                experts.layers.push(LayerKeys {
                    layer,
                    first: key,
                    keys: Vec::new(),
                });
            }
            let index = experts.layers.len() - 1;
            let keys = &mut experts.layers[index].keys;
            keys.resize(expert.index(), None);
            keys.push(Some(key));
            let index = u32::try_from(index).expect("layer numbers are distinct 32-bit integers");
            experts.experts.push((index, expert, bytes));
        }
        experts
    }

    /// Key of an expert, or `None` if `sizes` did not contain it.
    pub fn key(&self, layer: LayerId, expert: ExpertId) -> Option<Key> {
        let index = self
            .layers
            .binary_search_by_key(&layer, |layer| layer.layer)
            .ok()?;
        *self.layers[index].keys.get(expert.index())?
    }

    /// Layer and expert of a key.
    ///
    /// # Panics
    /// If the key is [`Self::len`] or higher, as in all methods with a key.
    pub fn get(&self, key: Key) -> (LayerId, ExpertId) {
        let (index, expert, _) = self.experts[key as usize];
        (self.layers[index as usize].layer, expert)
    }

    /// Index of a key's layer among the layers that have experts, from 0. Dense layers have no index.
    pub fn layer_index(&self, key: Key) -> usize {
        self.experts[key as usize].0 as usize
    }

    /// The keys of all experts.
    pub(super) fn keys(&self) -> Range<Key> {
        0..Key::try_from(self.experts.len()).expect("`new` assigns 32-bit keys")
    }

    /// Keys of the layer with this [`Self::layer_index`].
    pub fn keys_of(&self, layer_index: usize) -> Range<Key> {
        let first = |index: usize| self.layers.get(index).map(|layer| layer.first);
        let end = self.keys().end;
        first(layer_index).unwrap_or(end)..first(layer_index + 1).unwrap_or(end)
    }

    /// Size of an expert in bytes.
    pub fn bytes(&self, key: Key) -> u64 {
        self.experts[key as usize].2
    }

    /// Number of experts in all layers.
    pub fn len(&self) -> usize {
        self.experts.len()
    }

    /// Whether there are no experts.
    pub fn is_empty(&self) -> bool {
        self.experts.is_empty()
    }

    /// Number of layers that have experts.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Total size of all experts in bytes.
    pub fn total_bytes(&self) -> u64 {
        let bytes = self.experts.iter().map(|&(_, _, bytes)| bytes);
        bytes.fold(0, u64::saturating_add)
    }

    /// Size of every expert in bytes; `None` if the sizes differ or there are no experts.
    pub fn equal_bytes(&self) -> Option<u64> {
        let (_, _, first) = *self.experts.first()?;
        let equal = self.experts.iter().all(|&(_, _, bytes)| bytes == first);
        equal.then_some(first)
    }

    /// The experts of each layer, renumbered from 0, with the key in `self` of the layer's first expert.
    pub(super) fn by_layer(&self) -> Vec<(Key, Experts)> {
        let layers = self.layers.iter().map(|layer| {
            let keys = layer.keys.iter().flatten().copied();
            let sizes =
                keys.map(|key| (layer.layer, self.experts[key as usize].1, self.bytes(key)));
            (layer.first, Experts::new(&sizes.collect()))
        });
        layers.collect()
    }

    /// Sizes of all experts.
    pub fn sizes(&self) -> ExpertSizes {
        let experts = self.experts.iter();
        experts
            .map(|&(index, expert, bytes)| (self.layers[index as usize].layer, expert, bytes))
            .collect()
    }
}
