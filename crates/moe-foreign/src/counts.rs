//! Counts of a trace, whether it told rows or counts.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use moe_trace::{
    CountRow, ExpertId, LayerId, LayerRow, Phase, RoutingRow, Sink, SinkError, TokenStarts,
};

/// How often one expert was chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpertCount {
    /// Times it was chosen.
    pub count: u64,
    /// Sum of the router weights; `None` if a part of them is not told.
    pub mass: Option<f64>,
}

impl ExpertCount {
    fn add(&mut self, count: u64, mass: Option<f64>) {
        let sum = if self.count == 0 {
            mass
        } else {
            self.mass.zip(mass).map(|(sum, more)| sum + more)
        };
        self.count = self.count.saturating_add(count);
        self.mass = sum;
    }
}

/// One layer in one phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerCounts {
    /// Passes in which it routed something; `None` = not told.
    pub calls: Option<u64>,
    /// Tokens that it routed; `None` = not told.
    pub rows: Option<u64>,
    /// The experts that were chosen.
    pub experts: BTreeMap<ExpertId, ExpertCount>,
}

/// Counts of every layer and phase; memory grows with the experts seen, not with the trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    layers: BTreeMap<(LayerId, Option<Phase>), LayerCounts>,
    /// Time of the last pass seen, by layer.
    last_pass: BTreeMap<LayerId, u64>,
    tokens: TokenStarts,
    n_slot: u32,
}

impl Counts {
    /// Every layer and phase that was seen, layers ascending.
    pub fn iter(&self) -> impl Iterator<Item = (LayerId, Option<Phase>, &LayerCounts)> {
        self.layers
            .iter()
            .map(|(&(layer, phase), counts)| (layer, phase, counts))
    }

    /// The layers that were seen, ascending, their phases summed.
    pub fn layers(&self) -> BTreeMap<LayerId, LayerCounts> {
        let mut layers = BTreeMap::new();
        for (layer, _, counts) in self.iter() {
            match layers.entry(layer) {
                Entry::Vacant(vacant) => {
                    vacant.insert(counts.clone());
                }
                Entry::Occupied(mut sum) => sum.get_mut().add(counts),
            }
        }
        layers
    }

    /// Experts in a layer, as far as was seen: the highest id plus one.
    pub fn n_expert_seen(&self) -> u32 {
        let highest = self
            .layers
            .values()
            .filter_map(|layer| layer.experts.last_key_value());
        highest.map(|(expert, _)| expert.0 + 1).max().unwrap_or(0)
    }

    /// Experts of a token, as far as was seen: the highest slot plus one; 0 without rows.
    pub fn n_slot_seen(&self) -> u32 {
        self.n_slot
    }
}

impl LayerCounts {
    /// All choices of the layer.
    pub fn total(&self) -> u64 {
        self.experts
            .values()
            .fold(0, |sum, tally| sum.saturating_add(tally.count))
    }

    fn add(&mut self, other: &LayerCounts) {
        let sum = |a: Option<u64>, b: Option<u64>| a.zip(b).map(|(a, b)| a.saturating_add(b));
        self.calls = sum(self.calls, other.calls);
        self.rows = sum(self.rows, other.rows);
        for (&expert, tally) in &other.experts {
            let sum = self.experts.entry(expert).or_default();
            sum.add(tally.count, tally.mass);
        }
    }
}

impl Sink for Counts {
    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        let layer = self.layers.entry((row.layer_id, row.phase)).or_default();
        if self.tokens.is_start(row.token(), row.slot.into()) {
            layer.rows = Some(layer.rows.unwrap_or(0) + 1);
        }
        if let Some(timestamp_ns) = row.timestamp_ns
            && self.last_pass.insert(row.layer_id, timestamp_ns) != Some(timestamp_ns)
        {
            layer.calls = Some(layer.calls.unwrap_or(0) + 1);
        }
        self.n_slot = self.n_slot.max(u32::from(row.slot) + 1);
        let tally = layer.experts.entry(row.expert_id).or_default();
        tally.add(1, row.weight.map(f64::from));
        Ok(())
    }

    fn count(&mut self, row: &CountRow) -> Result<(), SinkError> {
        let layer = self.layers.entry((row.layer_id, row.phase)).or_default();
        let tally = layer.experts.entry(row.expert_id).or_default();
        tally.add(row.count, row.mass);
        Ok(())
    }

    fn layer(&mut self, row: &LayerRow) -> Result<(), SinkError> {
        let layer = self.layers.entry((row.layer_id, row.phase)).or_default();
        let sum = |old: Option<u64>, more: Option<u64>| match (old, more) {
            (Some(old), Some(more)) => Some(old.saturating_add(more)),
            (old, more) => old.or(more),
        };
        layer.calls = sum(layer.calls, row.calls);
        layer.rows = sum(layer.rows, row.rows);
        Ok(())
    }
}
