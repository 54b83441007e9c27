//! [`Counts`]: expert counts of a trace, summed from routing or from recorded counts.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use moe_trace::{
    CountRow, ExpertId, LayerId, LayerRow, Phase, RoutingRow, Sink, SinkError, TokenStarts,
};

/// Number of tokens that selected an expert, and their router weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpertCount {
    /// Number of tokens that selected the expert.
    pub count: u64,
    /// Sum of the router weights; `None` if any of them is unknown.
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

/// Counts of one layer in one phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerCounts {
    /// Number of passes in which the layer routed tokens; `None` if unknown.
    pub calls: Option<u64>,
    /// Number of tokens that the layer routed; `None` if unknown.
    pub n_tokens: Option<u64>,
    /// The experts that any token selected.
    pub experts: BTreeMap<ExpertId, ExpertCount>,
}

/// Counts of every layer and phase. Memory grows with the number of experts, not with the trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    layers: BTreeMap<(LayerId, Option<Phase>), LayerCounts>,
    /// Timestamp of the last pass, by layer.
    last_pass: BTreeMap<LayerId, u64>,
    tokens: TokenStarts,
    n_slot: u32,
}

impl Counts {
    /// Iterates over every layer and phase of the trace, layers ascending. The phase is `None` if it is unknown.
    pub fn iter(&self) -> impl Iterator<Item = (LayerId, Option<Phase>, &LayerCounts)> {
        self.layers
            .iter()
            .map(|(&(layer, phase), counts)| (layer, phase, counts))
    }

    /// Every layer of the trace, ascending, with its phases summed.
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

    /// Lower bound of the number of experts in a layer: the highest expert id + 1.
    pub fn n_expert_seen(&self) -> u32 {
        let highest = self
            .layers
            .values()
            .filter_map(|layer| layer.experts.last_key_value());
        highest.map(|(expert, _)| expert.0 + 1).max().unwrap_or(0)
    }

    /// Lower bound of the number of experts that a token selects: the highest slot + 1; 0 without routing.
    pub fn n_slot_seen(&self) -> u32 {
        self.n_slot
    }
}

impl LayerCounts {
    /// Number of selections in the layer: the sum over its experts.
    pub fn total(&self) -> u64 {
        self.experts
            .values()
            .fold(0, |sum, tally| sum.saturating_add(tally.count))
    }

    fn add(&mut self, other: &LayerCounts) {
        let sum = |a: Option<u64>, b: Option<u64>| a.zip(b).map(|(a, b)| a.saturating_add(b));
        self.calls = sum(self.calls, other.calls);
        self.n_tokens = sum(self.n_tokens, other.n_tokens);
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
            layer.n_tokens = Some(layer.n_tokens.unwrap_or(0) + 1);
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
        layer.n_tokens = sum(layer.n_tokens, row.n_tokens);
        Ok(())
    }
}
