//! What a runtime without a hot cache can do with a budget: keep the experts of whole layers on the GPU.

use std::collections::{BTreeMap, BTreeSet};

use moe_ids::LayerId;

/// A layer's experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerExperts {
    /// Bytes of all of them.
    pub bytes: u64,
    /// How often one of them was chosen.
    pub hits: u64,
}

/// The layers whose experts a budget has room for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WholeLayers {
    /// Block numbers in the model.
    pub layers: BTreeSet<LayerId>,
    /// Bytes of their experts.
    pub bytes: u64,
    /// Choices that fall on them.
    pub hits: u64,
}

impl WholeLayers {
    fn take(&mut self, layer: LayerId, experts: LayerExperts, budget: u64) -> bool {
        let bytes = self.bytes.saturating_add(experts.bytes);
        if bytes > budget {
            return false;
        }
        self.bytes = bytes;
        self.hits = self.hits.saturating_add(experts.hits);
        self.layers.insert(layer)
    }

    /// As many layers as fit, counted from the last: llama.cpp's `--n-cpu-moe` keeps the experts of the first ones on the CPU.
    pub fn last(experts: &BTreeMap<LayerId, LayerExperts>, budget: u64) -> WholeLayers {
        let mut kept = WholeLayers::default();
        let mut backwards = experts.iter().rev();
        while let Some((&layer, &experts)) = backwards.next()
            && kept.take(layer, experts, budget)
        {}
        kept
    }

    /// The layers with the most choices a byte, as long as they fit; of equal ones the later.
    pub fn best(experts: &BTreeMap<LayerId, LayerExperts>, budget: u64) -> WholeLayers {
        let mut order: Vec<(LayerId, LayerExperts)> = experts
            .iter()
            .rev()
            .map(|(&layer, &experts)| (layer, experts))
            .collect();
        order.sort_by(|(_, a), (_, b)| {
            let product = |hits: u64, bytes: u64| u128::from(hits) * u128::from(bytes);
            product(b.hits, a.bytes).cmp(&product(a.hits, b.bytes))
        });
        let mut kept = WholeLayers::default();
        for (layer, experts) in order {
            kept.take(layer, experts, budget);
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(experts: &[(u16, u64, u64)]) -> BTreeMap<LayerId, LayerExperts> {
        let layer = |&(layer, bytes, hits)| (LayerId(layer), LayerExperts { bytes, hits });
        experts.iter().map(layer).collect()
    }

    #[test]
    fn last_layers_that_fit() {
        let experts = layers(&[(1, 10, 5), (2, 10, 5), (3, 30, 5), (4, 10, 4)]);
        let kept = WholeLayers::last(&experts, 45);
        assert_eq!(kept.layers, BTreeSet::from([3, 4].map(LayerId)));
        assert_eq!((kept.bytes, kept.hits), (40, 9));
        assert!(WholeLayers::last(&experts, 9).layers.is_empty());
        assert_eq!(WholeLayers::last(&experts, 60).layers.len(), 4);
    }

    /// Without the large layer three small ones fit.
    #[test]
    fn best_layers_by_hits_a_byte() {
        let experts = layers(&[(1, 10, 5), (2, 10, 5), (3, 30, 5), (4, 10, 4)]);
        let kept = WholeLayers::best(&experts, 45);
        assert_eq!(kept.layers, BTreeSet::from([1, 2, 4].map(LayerId)));
        assert_eq!((kept.bytes, kept.hits), (30, 14));
        let kept = WholeLayers::best(&experts, 10);
        assert_eq!(
            kept.layers,
            BTreeSet::from([LayerId(2)]),
            "of equal layers the later"
        );
    }
}
