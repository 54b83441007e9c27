//! What is read as a whole: an expert of a layer, or a tensor that belongs to no expert.

use std::collections::HashMap;

use moe_gguf::map::{Category, MapRow, OffsetMap};
use moe_placement::plan::ExpertSizes;
use moe_trace::Access;

/// Experts of a layer that biases can be of; a map that tells more is no model's.
const MAX_EXPERTS: u64 = 4096;

/// Place of a unit in [`Units`].
pub(super) type UnitId = usize;

/// Bytes of each expert of a model: all its tensors, gate, up and down, and its rows of biases.
pub fn expert_sizes(map: &OffsetMap) -> ExpertSizes {
    let units = Units::new(map).units.into_iter();
    let experts =
        units.filter_map(|unit| Some((unit.layer?.into(), unit.expert?, unit.size_bytes)));
    experts.collect()
}

/// The units of a model.
pub(super) struct Units {
    units: Vec<Unit>,
    tensors: HashMap<u32, Tensor>,
    by_expert: HashMap<(u16, u32), UnitId>,
    n_layer: usize,
}

struct Unit {
    layer: Option<u16>,
    expert: Option<u32>,
    size_bytes: u64,
}

struct Tensor {
    layer: Option<u16>,
    /// The unit that the whole tensor is; `None` for one whose bytes belong to experts.
    whole: Option<UnitId>,
    /// Bytes of a row.
    row_bytes: Option<u64>,
}

impl Units {
    /// An expert's unit has the bytes of all its tensors: gate, up and down, and its rows of biases.
    pub(super) fn new(map: &OffsetMap) -> Units {
        let mut units = Units {
            units: Vec::new(),
            tensors: HashMap::new(),
            by_expert: HashMap::new(),
            n_layer: 0,
        };
        for rows in map.rows.chunk_by(|a, b| a.tensor_idx == b.tensor_idx) {
            units.add(rows);
        }
        units
    }

    fn add(&mut self, rows: &[MapRow]) {
        let Some(first) = rows.first() else { return };
        let layer = first.layer_id;
        if let Some(layer) = layer {
            self.n_layer = self.n_layer.max(usize::from(layer) + 1);
        }
        let biases = (first.category == Category::ExpertBias
            && first.expert_id.is_none()
            && first.ne[2] == 1)
            .then_some(first.ne[1])
            .filter(|&n| n > 1 && n <= MAX_EXPERTS);
        let whole = match (layer, first.expert_id, biases) {
            (Some(layer), None, Some(n)) => {
                for expert in (0..n).map_while(|n| u32::try_from(n).ok()) {
                    self.grow(layer, expert, first.size_bytes / n);
                }
                None
            }
            (Some(layer), Some(_), _) => {
                for row in rows {
                    self.grow(layer, row.expert_id.unwrap_or(0), row.size_bytes);
                }
                // A tensor of one expert alone is read as a whole.
                let alone = (rows.len() == 1).then(|| (layer, first.expert_id.unwrap_or(0)));
                alone.and_then(|key| self.by_expert.get(&key).copied())
            }
            _ => Some(self.push(layer, None, sum(rows))),
        };
        let row_bytes = first.size_bytes.checked_div(first.ne[1]);
        let tensor = Tensor {
            layer,
            whole,
            row_bytes,
        };
        self.tensors.insert(first.tensor_idx, tensor);
    }

    fn push(&mut self, layer: Option<u16>, expert: Option<u32>, size_bytes: u64) -> UnitId {
        self.units.push(Unit {
            layer,
            expert,
            size_bytes,
        });
        self.units.len() - 1
    }

    /// Adds bytes to an expert's unit.
    fn grow(&mut self, layer: u16, expert: u32, size_bytes: u64) {
        match self.by_expert.get(&(layer, expert)) {
            Some(&unit) => {
                let unit = &mut self.units[unit];
                unit.size_bytes = unit.size_bytes.saturating_add(size_bytes);
            }
            None => {
                let unit = self.push(Some(layer), Some(expert), size_bytes);
                self.by_expert.insert((layer, expert), unit);
            }
        }
    }

    /// The unit that an access reads; `None` for what the map does not have.
    pub(super) fn of(&self, access: &Access) -> Option<UnitId> {
        let tensor = self.tensors.get(&access.tensor_idx?)?;
        match access.expert_id {
            Some(expert) => self.by_expert.get(&(tensor.layer?, expert)).copied(),
            None => tensor.whole,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.units.len()
    }

    pub(super) fn n_layer(&self) -> usize {
        self.n_layer
    }

    pub(super) fn layer(&self, unit: UnitId) -> Option<u16> {
        self.units.get(unit)?.layer
    }

    pub(super) fn expert(&self, unit: UnitId) -> Option<u32> {
        self.units.get(unit)?.expert
    }

    pub(super) fn size(&self, unit: UnitId) -> u64 {
        self.units.get(unit).map_or(0, |unit| unit.size_bytes)
    }

    pub(super) fn total_bytes(&self) -> u64 {
        let sizes = self.units.iter().map(|unit| unit.size_bytes);
        sizes.fold(0, u64::saturating_add)
    }

    /// Bytes of a row of a tensor.
    pub(super) fn row_bytes(&self, tensor_idx: u32) -> Option<u64> {
        self.tensors.get(&tensor_idx)?.row_bytes
    }
}

fn sum(rows: &[MapRow]) -> u64 {
    let sizes = rows.iter().map(|row| row.size_bytes);
    sizes.fold(0, u64::saturating_add)
}
