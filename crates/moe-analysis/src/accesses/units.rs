//! Units of access: an expert of a layer with all its tensors, or a tensor that is not split into experts.

use std::collections::HashMap;

use moe_gguf::experts::{ExpertParts, expert_bytes};
use moe_gguf::map::{MapRow, OffsetMap};
use moe_trace::{Access, ExpertId, LayerId};

/// Index of a unit in [`Units`].
pub(super) type UnitId = usize;

/// The units of a model.
pub(super) struct Units {
    units: Vec<Unit>,
    tensors: HashMap<u32, Tensor>,
    by_expert: HashMap<(LayerId, ExpertId), UnitId>,
    n_layer: usize,
}

struct Unit {
    layer: Option<LayerId>,
    expert: Option<ExpertId>,
    size_bytes: u64,
}

struct Tensor {
    layer: Option<LayerId>,
    parts: Parts,
    /// Bytes per row (`ne[0]` elements).
    row_bytes: Option<u64>,
}

/// How a tensor is divided into units.
enum Parts {
    /// The tensor is one unit, or part of the unit of one expert.
    Single(UnitId),
    /// Each expert of the layer has a part of the tensor.
    Experts,
    /// Slices that the router does not select individually. Each is its own unit.
    Slices(HashMap<ExpertId, UnitId>),
}

impl Units {
    /// Units of a model. The size of an expert is that of [`expert_bytes`]; every other tensor is its own unit.
    pub(super) fn new(map: &OffsetMap) -> Units {
        let mut units = Units {
            units: Vec::new(),
            tensors: HashMap::new(),
            by_expert: HashMap::new(),
            n_layer: 0,
        };
        for ((layer, expert), bytes) in expert_bytes(map) {
            let unit = units.push(Some(layer), Some(expert), bytes);
            units.by_expert.insert((layer, expert), unit);
        }
        let parts = ExpertParts::of(map);
        for rows in map.rows.chunk_by(|a, b| a.tensor_idx == b.tensor_idx) {
            units.add(rows, &parts);
        }
        units
    }

    /// Adds a tensor, given its rows in the offset map.
    fn add(&mut self, rows: &[MapRow], expert_parts: &ExpertParts) {
        let Some(first) = rows.first() else { return };
        let layer = first.layer_id;
        if let Some(layer) = layer {
            self.n_layer = self.n_layer.max(layer.index() + 1);
        }
        let row_bytes = first.size_bytes.checked_div(first.ne[1]);
        let parts = if expert_parts.contains(first) {
            // The tensor belongs to one expert only.
            let key = layer.zip(first.expert_id).filter(|_| rows.len() == 1);
            let unit = key.and_then(|key| self.by_expert.get(&key).copied());
            unit.map_or(Parts::Experts, Parts::Single)
        } else if rows.len() > 1 {
            let slices = rows.iter().map(|row| {
                let unit = self.push(layer, None, row.size_bytes);
                (row.expert_id.unwrap_or_default(), unit)
            });
            Parts::Slices(slices.collect())
        } else {
            Parts::Single(self.push(layer, None, first.size_bytes))
        };
        let tensor = Tensor {
            layer,
            parts,
            row_bytes,
        };
        self.tensors.insert(first.tensor_idx, tensor);
    }

    fn push(
        &mut self,
        layer: Option<LayerId>,
        expert: Option<ExpertId>,
        size_bytes: u64,
    ) -> UnitId {
        self.units.push(Unit {
            layer,
            expert,
            size_bytes,
        });
        self.units.len() - 1
    }

    /// The unit that an access reads; `None` if the access is not in the offset map.
    pub(super) fn of(&self, access: &Access) -> Option<UnitId> {
        let tensor = self.tensors.get(&access.tensor_idx?)?;
        match &tensor.parts {
            Parts::Single(unit) => Some(*unit),
            Parts::Experts => {
                let key = (tensor.layer?, access.expert_id?);
                self.by_expert.get(&key).copied()
            }
            Parts::Slices(units) => units.get(&access.expert_id?).copied(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.units.len()
    }

    pub(super) fn n_layer(&self) -> usize {
        self.n_layer
    }

    pub(super) fn layer(&self, unit: UnitId) -> Option<LayerId> {
        self.units.get(unit)?.layer
    }

    pub(super) fn expert(&self, unit: UnitId) -> Option<ExpertId> {
        self.units.get(unit)?.expert
    }

    pub(super) fn size(&self, unit: UnitId) -> u64 {
        self.units.get(unit).map_or(0, |unit| unit.size_bytes)
    }

    pub(super) fn total_bytes(&self) -> u64 {
        let sizes = self.units.iter().map(|unit| unit.size_bytes);
        sizes.fold(0, u64::saturating_add)
    }

    /// Bytes per row of a tensor.
    pub(super) fn row_bytes(&self, tensor_idx: u32) -> Option<u64> {
        self.tensors.get(&tensor_idx)?.row_bytes
    }
}

#[cfg(test)]
mod tests {
    use moe_gguf::{GgmlType, Gguf};
    use moe_synth::write::Header;

    use super::*;

    fn access(tensor_idx: u32, expert_id: Option<ExpertId>) -> Access {
        Access {
            source: 0,
            tensor_idx: Some(tensor_idx),
            expert_id,
            file: 0,
            file_offset: 0,
            size_bytes: 0,
        }
    }

    /// In GroveMoE, a chunk expert belongs to several experts. It must not count as an expert.
    #[test]
    fn chunk_experts_are_units_of_their_own() {
        let mut header = Header::new();
        for (name, ne) in [
            ("blk.0.ffn_up_exps.weight", [4, 2, 4]),
            ("blk.0.ffn_down_exps.weight", [2, 4, 4]),
            ("blk.0.ffn_up_chexps.weight", [4, 1, 2]),
            ("blk.0.ffn_gate_inp.weight", [4, 4, 1]),
        ] {
            header.tensor(name, GgmlType::F32, &ne).unwrap();
        }
        let gguf = Gguf::from_bytes("chunks.gguf", header.encode().unwrap()).unwrap();
        let units = Units::new(&OffsetMap::new(&gguf));
        let expert = units.of(&access(1, Some(ExpertId(1)))).unwrap();
        assert_eq!(units.of(&access(0, Some(ExpertId(1)))), Some(expert));
        assert_eq!(
            (units.expert(expert), units.size(expert)),
            (Some(ExpertId(1)), 64)
        );
        let chunk = units.of(&access(2, Some(ExpertId(1)))).unwrap();
        assert_ne!(chunk, expert);
        assert_eq!((units.expert(chunk), units.size(chunk)), (None, 16));
        let total: u64 = gguf.tensors().iter().map(|t| t.size_bytes).sum();
        assert_eq!(units.total_bytes(), total);
    }
}
