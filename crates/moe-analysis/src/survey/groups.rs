//! Counts and router mass of several parts of a trace.

use std::collections::HashMap;

use crate::hotness::ExpertTally;
use moe_trace::{ExpertId, LayerId};

/// Tallies held, at most: 256 MiB of them.
const MAX_CELLS: usize = 1 << 24;
/// Names held, at most.
const MAX_GROUPS: usize = 1 << 20;

/// Tallies by group, layer and expert; groups in the order in which they came.
#[derive(Debug, Clone, Default)]
pub struct Groups {
    names: Vec<String>,
    index: HashMap<String, usize>,
    last: usize,
    /// `[group][n_layer]`
    layers: Vec<Vec<GroupLayer>>,
    n_cells: usize,
}

/// A layer of a group.
#[derive(Debug, Clone, Default)]
struct GroupLayer {
    rows: u64,
    /// `[up to n_expert]`
    experts: Vec<ExpertTally>,
}

impl Groups {
    /// Adds a token's experts. Gives the number of groups where they are too many.
    pub(super) fn add(
        &mut self,
        name: &str,
        layer: LayerId,
        experts: &[(ExpertId, f64)],
    ) -> Result<(), usize> {
        self.layer(name, layer)?.rows += 1;
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
        // Tokens of a group mostly come together.
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

    /// Tokens of a group that a layer routed; 0 where counts alone are told.
    pub fn rows(&self, group: usize, layer: LayerId) -> u64 {
        self.get(group, layer).map_or(0, |layer| layer.rows)
    }

    /// Count and mass of the experts of a layer in a group, up to the highest that was chosen.
    pub fn experts(&self, group: usize, layer: LayerId) -> &[ExpertTally] {
        self.get(group, layer).map_or(&[], |layer| &layer.experts)
    }

    /// Counts of the experts of a layer in a group, up to the highest that was chosen.
    pub fn counts(&self, group: usize, layer: LayerId) -> Vec<u64> {
        let experts = self.experts(group, layer).iter();
        experts.map(|tally| tally.count).collect()
    }

    fn get(&self, group: usize, layer: LayerId) -> Option<&GroupLayer> {
        self.layers.get(group)?.get(layer.index())
    }
}
