//! Layer-wise offload, the alternative to a hot cache: keep all experts of some layers on the GPU.

use std::collections::{BTreeMap, BTreeSet};

use moe_ids::LayerId;

/// All experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerExperts {
    /// Total size in bytes.
    pub bytes: u64,
    /// Number of selections.
    pub hits: u64,
}

/// The layers whose experts are all on the GPU, within a budget.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OffloadedLayers {
    /// Block numbers in the model.
    pub layers: BTreeSet<LayerId>,
    /// Total size of their experts in bytes.
    pub bytes: u64,
    /// Number of selections of their experts.
    pub hits: u64,
}

impl OffloadedLayers {
    fn take(&mut self, layer: LayerId, experts: LayerExperts, budget: u64) -> bool {
        let bytes = self.bytes.saturating_add(experts.bytes);
        if bytes > budget {
            return false;
        }
        self.bytes = bytes;
        self.hits = self.hits.saturating_add(experts.hits);
        self.layers.insert(layer)
    }

    /// The last layers that fit, as llama.cpp's `--n-cpu-moe` selects them: it keeps the experts of the first layers on the
    /// CPU.
    pub fn last(experts: &BTreeMap<LayerId, LayerExperts>, budget: u64) -> OffloadedLayers {
        let mut kept = OffloadedLayers::default();
        let mut backwards = experts.iter().rev();
        while let Some((&layer, &experts)) = backwards.next()
            && kept.take(layer, experts, budget)
        {}
        kept
    }

    /// Layers by selections per byte, highest first; a layer that does not fit is skipped. Ties go to the later layer.
    pub fn best(experts: &BTreeMap<LayerId, LayerExperts>, budget: u64) -> OffloadedLayers {
        let mut order: Vec<(LayerId, LayerExperts)> = experts
            .iter()
            .rev()
            .map(|(&layer, &experts)| (layer, experts))
            .collect();
        order.sort_by(|(_, a), (_, b)| {
            let product = |hits: u64, bytes: u64| u128::from(hits) * u128::from(bytes);
            product(b.hits, a.bytes).cmp(&product(a.hits, b.bytes))
        });
        let mut kept = OffloadedLayers::default();
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
    fn selects_last_layers_that_fit() {
        let experts = layers(&[(1, 10, 5), (2, 10, 5), (3, 30, 5), (4, 10, 4)]);
        let kept = OffloadedLayers::last(&experts, 45);
        assert_eq!(kept.layers, BTreeSet::from([3, 4].map(LayerId)));
        assert_eq!((kept.bytes, kept.hits), (40, 9));
        assert!(OffloadedLayers::last(&experts, 9).layers.is_empty());
        assert_eq!(OffloadedLayers::last(&experts, 60).layers.len(), 4);
    }

    /// Layer 3 would displace three smaller layers.
    #[test]
    fn selects_layers_by_hits_per_byte() {
        let experts = layers(&[(1, 10, 5), (2, 10, 5), (3, 30, 5), (4, 10, 4)]);
        let kept = OffloadedLayers::best(&experts, 45);
        assert_eq!(kept.layers, BTreeSet::from([1, 2, 4].map(LayerId)));
        assert_eq!((kept.bytes, kept.hits), (30, 14));
        let kept = OffloadedLayers::best(&experts, 10);
        assert_eq!(
            kept.layers,
            BTreeSet::from([LayerId(2)]),
            "ties go to the later layer"
        );
    }
}
