//! The table `routing`: a row for each token and layer with experts.

use std::collections::BTreeMap;

use moe_trace::is_router_weight;
use moe_trace::record::lane;

use crate::document::{index, renumber};
use crate::model::LayerUse;
use crate::table::Column;

/// Names of the lanes: those of records, without `unknown`.
pub(crate) fn lane_names() -> Vec<&'static str> {
    lane::NAMES.into_iter().skip(1).collect()
}

/// A selected expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Selected {
    pub expert: i32,
    /// Index of the lane in [`lane_names`]; -1 if it is unknown.
    pub lane: i32,
    /// Router weight × 255; -1 if it is unknown.
    pub weight: i32,
}

impl Selected {
    pub fn new(expert: u32, weight: Option<f32>, number: Option<u8>) -> Selected {
        let lane = number.map_or(-1, |number| i32::from(number) - 1);
        let is_known = index(lane::NAMES.len() - 1) > lane;
        Selected {
            expert: i32::try_from(expert).unwrap_or(i32::MAX),
            lane: if is_known { lane } else { -1 },
            weight: weight.map_or(-1, quantized),
        }
    }
}

/// A router weight × 255, rounded, 0 to 255; -1 if it is not a weight.
fn quantized(weight: f32) -> i32 {
    if !is_router_weight(weight) {
        return -1;
    }
    (weight * 255.0).round().min(255.0) as i32
}

/// The rows. Each has a token, a layer, the start of its first expert operation, and its experts, best first.
#[derive(Debug, Default)]
pub(crate) struct Routing {
    token: Vec<i32>,
    layer: Vec<i32>,
    start: Vec<i64>,
    /// One past the last expert of each row.
    ends: Vec<usize>,
    selected: Vec<Selected>,
}

impl Routing {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.token.len()
    }

    /// Adds a row without experts, and returns its number.
    pub fn begin_row(&mut self, token: i32, layer: u16, start: i64) -> i32 {
        let row = index(self.token.len());
        self.token.push(token);
        self.layer.push(layer.into());
        self.start.push(start);
        self.ends.push(self.selected.len());
        row
    }

    /// Adds an expert to the last row.
    pub fn push(&mut self, selected: Selected) {
        if let Some(end) = self.ends.last_mut() {
            self.selected.push(selected);
            *end += 1;
        }
    }

    /// The experts of a row.
    pub fn row(&self, row: usize) -> &[Selected] {
        let end = self.ends.get(row).copied().unwrap_or(0);
        let before = row.checked_sub(1).and_then(|row| self.ends.get(row));
        self.selected
            .get(before.copied().unwrap_or(0)..end)
            .unwrap_or_default()
    }

    pub fn tokens(&self) -> &[i32] {
        &self.token
    }

    pub fn layers(&self) -> &[i32] {
        &self.layer
    }

    pub fn starts(&self) -> &[i64] {
        &self.start
    }

    /// Makes all times relative to `first`.
    pub fn rebase(&mut self, first: i64) {
        for start in &mut self.start {
            *start = start.saturating_sub(first).max(0);
        }
    }

    /// Replaces the numbers of tokens.
    pub fn renumber_tokens(&mut self, places: &[i32]) {
        renumber(&mut self.token, places);
    }

    /// Sets the start of each row to the number of its token, for a trace without timestamps.
    pub fn count_steps(&mut self) {
        self.start = self.token.iter().map(|&token| token.into()).collect();
    }

    /// Sorts the rows by start; equal rows keep their order. Returns the new number of each row, or `None` if the order is the same.
    pub fn sort(&mut self) -> Option<Vec<i32>> {
        if self.start.is_sorted() {
            return None;
        }
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.sort_by_key(|&row| self.start.get(row).copied());
        let mut sorted = Routing::default();
        let mut places = vec![-1; order.len()];
        for (place, &row) in order.iter().enumerate() {
            places[row] = index(place);
            sorted.token.push(self.token[row]);
            sorted.layer.push(self.layer[row]);
            sorted.start.push(self.start[row]);
            sorted.selected.extend_from_slice(self.row(row));
            sorted.ends.push(sorted.selected.len());
        }
        *self = sorted;
        Some(places)
    }

    /// Largest number of experts of a row.
    pub fn top_k(&self) -> usize {
        let rows = (0..self.len()).map(|row| self.row(row).len());
        rows.max().unwrap_or(0)
    }

    pub fn has_lanes(&self) -> bool {
        self.selected.iter().any(|selected| selected.lane >= 0)
    }

    pub fn has_weights(&self) -> bool {
        self.selected.iter().any(|selected| selected.weight >= 0)
    }

    /// Experts of each layer with rows.
    pub fn layer_use(&self) -> BTreeMap<u16, LayerUse> {
        let mut layers: BTreeMap<u16, LayerUse> = BTreeMap::new();
        for (row, &layer) in self.layer.iter().enumerate() {
            let Ok(layer) = u16::try_from(layer) else {
                continue;
            };
            let used = layers.entry(layer).or_default();
            let experts = self.row(row);
            used.top_k = used.top_k.max(index(experts.len()).unsigned_abs());
            for selected in experts {
                let n_expert = selected.expert.unsigned_abs().saturating_add(1);
                used.n_expert = used.n_expert.max(n_expert);
            }
        }
        layers
    }

    /// The columns of the first `n_rows` rows.
    pub fn columns(&self, n_rows: usize, with_weights: bool) -> Vec<Column> {
        let n = n_rows.min(self.len());
        let mut columns = vec![
            Column::dictionary("token", self.token[..n].to_vec()),
            Column::dictionary("layer", self.layer[..n].to_vec()),
            Column::times("start", self.start[..n].to_vec()),
        ];
        let top_k = self.top_k();
        let mut add = |name: &str, value: fn(&Selected) -> i32| {
            for k in 0..top_k {
                let values = (0..n).map(|row| self.row(row).get(k).map_or(-1, value));
                columns.push(Column::dictionary(format!("{name}{k}"), values.collect()));
            }
        };
        add("e", |selected| selected.expert);
        if self.has_lanes() {
            add("l", |selected| selected.lane);
        }
        if with_weights && self.has_weights() {
            add("w", |selected| selected.weight);
        }
        columns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expert(expert: u32) -> Selected {
        Selected::new(expert, Some(0.5), None)
    }

    #[test]
    fn sorts_rows_with_their_experts() {
        let mut routing = Routing::default();
        for (token, start, experts) in [(0, 30, &[1u32, 2][..]), (1, 10, &[3]), (2, 30, &[])] {
            routing.begin_row(token, 4, start);
            experts.iter().for_each(|&id| routing.push(expert(id)));
        }
        assert_eq!(routing.top_k(), 2);
        assert_eq!(routing.sort(), Some(vec![1, 0, 2]));
        assert_eq!(routing.sort(), None);
        assert_eq!(routing.tokens(), [1, 0, 2]);
        assert_eq!(routing.row(0), [expert(3)]);
        assert_eq!(routing.row(1), [expert(1), expert(2)]);
        assert!(routing.row(2).is_empty());
        let layer = routing.layer_use()[&4];
        assert_eq!((layer.n_expert, layer.top_k), (4, 2));
        assert!(routing.has_weights() && !routing.has_lanes());
        // token, layer, start, e0, e1, w0, w1
        assert_eq!(routing.columns(9, true).len(), 7);
        assert_eq!(routing.columns(9, false).len(), 5);
    }

    #[test]
    fn quantizes_weights_and_lanes() {
        for (weight, level) in [(0.0, 0), (0.5, 128), (1.0, 255), (7.5, 255), (f32::NAN, -1)] {
            assert_eq!(quantized(weight), level, "{weight}");
        }
        assert_eq!(lane_names().len(), 7);
        let lanes = [None, Some(0), Some(1), Some(7), Some(8)];
        let lanes = lanes.map(|number| Selected::new(0, None, number).lane);
        assert_eq!(lanes, [-1, -1, 0, 6, -1]);
    }
}
