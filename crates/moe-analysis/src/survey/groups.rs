//! Counts and router mass of the groups of a trace, for example of its sequences.

use std::collections::HashMap;

use moe_trace::{ExpertId, LayerId};

use crate::tally::ExpertTally;

/// Maximum number of tallies in memory (256 MiB).
const MAX_CELLS: usize = 1 << 24;
/// Maximum number of groups.
const MAX_GROUPS: usize = 1 << 20;

/// Tallies by group, layer and expert. Groups are in the order of their first token.
#[derive(Debug, Clone, Default)]
pub struct Groups {
    names: Vec<String>,
    index: HashMap<String, usize>,
    last: usize,
    /// `[group][n_layer]`: tallies.
    layers: Vec<Vec<GroupLayer>>,
    n_cells: usize,
}

/// A layer of a group.
#[derive(Debug, Clone, Default)]
struct GroupLayer {
    tokens: u64,
    /// `[up to n_expert]`: tally of each expert.
    experts: Vec<ExpertTally>,
}

impl Groups {
    /// Adds the experts of a token. The error is the number of groups when a limit is exceeded.
    pub(super) fn add(
        &mut self,
        name: &str,
        layer: LayerId,
        experts: &[(ExpertId, f64)],
    ) -> Result<(), usize> {
        self.layer(name, layer)?.tokens += 1;
        for &(expert, mass) in experts {
            let tally = ExpertTally { count: 1, mass };
            self.add_count(name, layer, expert, tally)?;
        }
        Ok(())
    }

    /// Adds a count of an expert.
    pub(super) fn add_count(
        &mut self,
        name: &str,
        layer: LayerId,
        expert: ExpertId,
        tally: ExpertTally,
    ) -> Result<(), usize> {
        let n_cells = self.n_cells;
        let experts = &mut self.layer(name, layer)?.experts;
        let expert = expert.index();
        let more = (expert + 1).saturating_sub(experts.len());
        if n_cells + more > MAX_CELLS {
            return Err(self.names.len());
        }
        if more > 0 {
            experts.resize(expert + 1, ExpertTally::default());
        }
        let sum = &mut experts[expert];
        sum.count = sum.count.saturating_add(tally.count);
        sum.mass += tally.mass;
        self.n_cells += more;
        Ok(())
    }

    fn layer(&mut self, name: &str, layer: LayerId) -> Result<&mut GroupLayer, usize> {
        // Most tokens belong to the same group as the previous token.
        if self.names.get(self.last).map(String::as_str) != Some(name) {
            self.last = match self.index.get(name) {
                Some(&group) => group,
                None if self.names.len() == MAX_GROUPS => return Err(MAX_GROUPS),
                None => {
                    self.index.insert(name.to_owned(), self.names.len());
                    self.names.push(name.to_owned());
                    self.layers.push(Vec::new());
                    self.names.len() - 1
                }
            };
        }
        let layers = &mut self.layers[self.last];
        let layer = layer.index();
        if layers.len() <= layer {
            layers.resize_with(layer + 1, GroupLayer::default);
        }
        Ok(&mut layers[layer])
    }

    /// Names of the groups.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Tokens of a group routed in a layer; 0 if the trace contains only counts.
    pub fn routed_tokens(&self, group: usize, layer: LayerId) -> u64 {
        self.get(group, layer).map_or(0, |layer| layer.tokens)
    }

    /// Tallies of the experts of a layer in a group, up to the highest selected expert id.
    pub fn experts(&self, group: usize, layer: LayerId) -> &[ExpertTally] {
        self.get(group, layer).map_or(&[], |layer| &layer.experts)
    }

    /// Counts of the experts of a layer in a group, up to the highest selected expert id.
    pub fn counts(&self, group: usize, layer: LayerId) -> Vec<u64> {
        let experts = self.experts(group, layer).iter();
        experts.map(|tally| tally.count).collect()
    }

    fn get(&self, group: usize, layer: LayerId) -> Option<&GroupLayer> {
        self.layers.get(group)?.get(layer.index())
    }
}
