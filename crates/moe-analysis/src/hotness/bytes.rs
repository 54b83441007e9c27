//! Bytes of each expert.

use std::collections::BTreeMap;

use moe_gguf::Gguf;
use moe_gguf::experts::expert_sizes;
use moe_gguf::map::{Category, OffsetMap, Projection};

/// Bytes of an expert's weights and biases in all projections, by (layer, expert).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExpertBytes {
    experts: BTreeMap<(u32, u32), u64>,
    /// Where a trace tells one size for all experts of a layer.
    layers: BTreeMap<u32, u64>,
}

impl ExpertBytes {
    /// Of a model.
    pub fn of_model(gguf: &Gguf) -> ExpertBytes {
        let sizes = expert_sizes(gguf).into_iter();
        ExpertBytes {
            experts: sizes
                .map(|size| ((size.layer.into(), size.expert), size.bytes))
                .collect(),
            ..ExpertBytes::default()
        }
    }

    /// Of a run's map of its model.
    pub fn of_map(map: &OffsetMap) -> ExpertBytes {
        let mut experts: BTreeMap<(u32, u32), u64> = BTreeMap::new();
        // Chunk experts are not chosen one by one.
        let weights = map
            .rows
            .iter()
            .filter(|row| row.category == Category::Expert && !row.tensor.contains("_chexps"));
        let mut fused = Vec::new();
        for row in weights.clone() {
            if let (Some(layer), Some(Projection::GateUp)) = (row.layer_id, row.projection) {
                fused.push(layer);
            }
        }
        fused.dedup();
        for row in weights {
            let (Some(layer), Some(expert)) = (row.layer_id, row.expert_id) else {
                continue;
            };
            // Where gate and up are one tensor, separate ones do not count.
            let is_separate = matches!(row.projection, Some(Projection::Gate | Projection::Up));
            if is_separate && fused.contains(&layer) {
                continue;
            }
            let sum = experts.entry((layer.into(), expert)).or_default();
            *sum = sum.saturating_add(row.size_bytes);
        }
        let biases = map
            .rows
            .iter()
            .filter(|row| row.category == Category::ExpertBias && row.tensor.ends_with(".bias"));
        for row in biases {
            // A row an expert: ne is [n, n_expert].
            let (Some(layer), n_expert @ 1..) = (row.layer_id, row.ne[1]) else {
                continue;
            };
            let layer = u32::from(layer);
            for (_, sum) in experts.range_mut((layer, 0)..(layer + 1, 0)) {
                *sum = sum.saturating_add(row.size_bytes / n_expert);
            }
        }
        ExpertBytes {
            experts,
            ..ExpertBytes::default()
        }
    }

    /// One size for all experts of a layer.
    pub fn of_layers(layers: impl IntoIterator<Item = (u32, u64)>) -> ExpertBytes {
        ExpertBytes {
            layers: layers.into_iter().collect(),
            ..ExpertBytes::default()
        }
    }

    /// Bytes of an expert of each layer. A layer whose experts differ in size has none.
    pub fn by_layer(&self) -> BTreeMap<u16, u64> {
        let told = self.layers.iter().map(|(&layer, &bytes)| (layer, bytes));
        let experts = self.experts.iter();
        let experts = experts.map(|(&(layer, _), &bytes)| (layer, bytes));
        let mut sizes: BTreeMap<u32, Option<u64>> = BTreeMap::new();
        for (layer, bytes) in told.chain(experts) {
            let size = sizes.entry(layer).or_insert(Some(bytes));
            *size = size.filter(|&size| size == bytes);
        }
        sizes
            .into_iter()
            .filter_map(|(layer, bytes)| Some((u16::try_from(layer).ok()?, bytes?)))
            .collect()
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.experts.is_empty() && self.layers.is_empty()
    }

    /// Bytes of an expert, if known.
    pub fn get(&self, layer: u32, expert: u32) -> Option<u64> {
        let own = self.experts.get(&(layer, expert));
        own.or_else(|| self.layers.get(&layer)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::ExpertBytes;

    #[test]
    fn a_layer_of_unequal_experts_has_no_size() {
        let experts = [
            ((0, 0), 7),
            ((0, 1), 7),
            ((2, 0), 7),
            ((2, 1), 8),
            ((2, 2), 7),
        ];
        let bytes = ExpertBytes {
            experts: experts.into(),
            layers: [(5, 9)].into(),
        };
        assert_eq!(bytes.by_layer(), [(0, 7), (5, 9)].into());
    }
}
