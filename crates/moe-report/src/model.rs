//! Files, tensors and layers of the model.

use std::collections::{BTreeMap, HashMap};

use moe_gguf::map::OffsetMap;
use moe_gguf::names::{Role, is_chunked};
use moe_trace::{LayerId, MAX_ID, ModelInfo};

use crate::document::{File, Layer, Tensor, index, layer_or_none};

/// Files and tensors of the model.
#[derive(Debug, Default)]
pub(crate) struct ModelTable {
    pub files: Vec<File>,
    pub tensors: Vec<Tensor>,
    /// Index in the tensor table of the model → index in `tensors`.
    by_index: HashMap<u32, i32>,
    by_name: HashMap<String, i32>,
}

impl ModelTable {
    /// The tensors of `map`, sorted by file and offset. Without a map, there are no tensors. `files` may be incomplete.
    pub fn new(map: Option<&OffsetMap>, files: Vec<File>) -> ModelTable {
        let rows = map.map_or(&[][..], |map| &map.rows[..]);
        let mut found: Vec<(u32, Tensor)> = Vec::new();
        for rows in rows.chunk_by(|a, b| a.tensor_idx == b.tensor_idx) {
            let Some(first) = rows.first() else { continue };
            let is_stacked = first.expert_id.is_some() && Role::of(&first.tensor).stacked;
            let n_expert = match first.n_stacked_biases() {
                _ if is_chunked(&first.tensor) => 0,
                Some(n_expert) => n_expert,
                None if is_stacked => rows.len() as u64,
                None => 0,
            };
            let offsets = rows.iter().map(|row| row.file_offset);
            let sizes = rows.iter().map(|row| row.size_bytes);
            let tensor = Tensor {
                name: first.tensor.to_string(),
                file: first.file,
                offset: offsets.min().unwrap_or(first.file_offset),
                size: sizes.fold(0, u64::saturating_add),
                layer: layer_or_none(first.layer_id),
                category: first.category.as_str(),
                projection: first.projection.map(|projection| projection.as_str()),
                ty: first.ty.name(),
                n_expert,
            };
            found.push((first.tensor_idx, tensor));
        }
        found.sort_by_key(|(_, tensor)| (tensor.file, tensor.offset));
        let mut table = ModelTable {
            files,
            ..ModelTable::default()
        };
        for (tensor_idx, tensor) in found {
            let place = index(table.tensors.len());
            table.by_index.insert(tensor_idx, place);
            table.by_name.insert(tensor.name.clone(), place);
            table.add_file(&tensor);
            table.tensors.push(tensor);
        }
        table
    }

    /// Adds the file of a tensor if the list of files does not contain it. Its size is at least the end of the tensor.
    fn add_file(&mut self, tensor: &Tensor) {
        let file = usize::from(tensor.file);
        while self.files.len() <= file {
            let name = format!("file {}", self.files.len());
            self.files.push(File { name, size: 0 });
        }
        let end = tensor.offset.saturating_add(tensor.size);
        if let Some(file) = self.files.get_mut(file) {
            file.size = file.size.max(end);
        }
    }

    /// Index of a tensor by its index in the tensor table of the model; -1 if it is unknown.
    pub fn by_index(&self, tensor_idx: u32) -> i32 {
        self.by_index.get(&tensor_idx).copied().unwrap_or(-1)
    }

    /// Index of a tensor by its name; -1 if it is unknown.
    pub fn by_name(&self, name: &str) -> i32 {
        self.by_name.get(name).copied().unwrap_or(-1)
    }
}

/// Experts of a layer in the trace.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LayerUse {
    /// Highest selected expert plus 1; 0 for a layer without experts.
    pub n_expert: u32,
    /// Largest number of experts of a token.
    pub top_k: u32,
}

/// All layers of the model and the trace, ascending.
pub(crate) fn layers(
    info: &ModelInfo,
    tensors: &[Tensor],
    used: &BTreeMap<u16, LayerUse>,
) -> Vec<Layer> {
    let mut layers = used.clone();
    let n_layer = info.n_layer.unwrap_or(0).min(MAX_ID);
    for layer in (0u16..).take_while(|&layer| u32::from(layer) < n_layer) {
        layers.entry(layer).or_default();
    }
    let mut stacked: BTreeMap<u16, u32> = BTreeMap::new();
    for tensor in tensors {
        let Ok(layer) = u16::try_from(tensor.layer) else {
            continue;
        };
        layers.entry(layer).or_default();
        if tensor.n_expert > 0 {
            let n_expert = u32::try_from(tensor.n_expert).unwrap_or(u32::MAX);
            let most = stacked.entry(layer).or_default();
            *most = n_expert.max(*most);
        }
    }
    let layers = layers.into_iter().map(|(layer, found)| {
        let known = stacked.get(&layer).copied();
        let is_routed = found.n_expert > 0 || info.moe_layers.contains(&LayerId(layer));
        let stated = info.n_expert.filter(|_| is_routed);
        let n_expert = known.or(stated).unwrap_or(0).max(found.n_expert);
        let stated = info
            .n_expert_used_in(LayerId(layer))
            .filter(|_| n_expert > 0);
        Layer {
            index: layer,
            n_expert,
            top_k: if found.top_k > 0 {
                found.top_k
            } else {
                stated.unwrap_or(0)
            },
            selections: None,
        }
    });
    layers.collect()
}

#[cfg(test)]
mod tests {
    use moe_gguf::Gguf;

    use super::*;

    fn fixture() -> OffsetMap {
        let path = moe_testkit::fixture("tiny-qwen3moe-Q4_K_M.gguf");
        OffsetMap::new(&Gguf::open(path).unwrap())
    }

    #[test]
    fn expert_tensor_is_one_entry_with_its_number_of_experts() {
        let map = fixture();
        let table = ModelTable::new(Some(&map), Vec::new());
        let place = table.by_name("blk.0.ffn_up_exps.weight");
        let tensor = &table.tensors[usize::try_from(place).unwrap()];
        assert_eq!((tensor.n_expert, tensor.category), (32, "expert"));
        assert_eq!((tensor.layer, tensor.projection), (0, Some("up")));
        let rows = map.rows.iter();
        let rows = rows.filter(|row| &*row.tensor == "blk.0.ffn_up_exps.weight");
        assert_eq!(tensor.size, rows.map(|row| row.size_bytes).sum::<u64>());
        let ends = table
            .tensors
            .iter()
            .map(|tensor| tensor.offset + tensor.size);
        assert_eq!(table.files[0].size, ends.max().unwrap());
        let order: Vec<u64> = table.tensors.iter().map(|tensor| tensor.offset).collect();
        assert!(order.is_sorted());
        assert_eq!(table.by_name("no such tensor"), -1);
    }

    #[test]
    fn layers_include_those_without_experts() {
        let info = ModelInfo {
            n_layer: Some(3),
            n_expert: Some(8),
            n_expert_used: Some(2),
            ..ModelInfo::default()
        };
        let used = LayerUse {
            n_expert: 5,
            top_k: 2,
        };
        let layers = layers(&info, &[], &BTreeMap::from([(1, used)]));
        let layers: Vec<_> = layers
            .iter()
            .map(|layer| (layer.index, layer.n_expert, layer.top_k))
            .collect();
        assert_eq!(layers, [(0, 0, 0), (1, 8, 2), (2, 0, 0)]);
    }
}
