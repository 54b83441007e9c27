//! The routing of a trace, in passes over the layers.

use std::collections::{BTreeMap, BTreeSet};

use moe_trace::{LayerId, Phase};

/// Which experts the tokens of a trace go to: passes in the order of the trace, each with its layers upwards.
#[derive(Debug, Default)]
pub struct Routes {
    /// Experts of a token, by layer.
    pub(super) k: BTreeMap<LayerId, usize>,
    /// Position of each row.
    positions: Vec<u32>,
    /// `(row, k)`, where each layer has its own `k`.
    ids: Vec<i32>,
    /// `(row, k)`
    weights: Vec<f32>,
    /// Layers of all passes.
    layers: Vec<LayerEnd>,
    passes: Vec<PassEnd>,
    /// Whether the trace lacked weights, so that all experts of a token weigh the same.
    pub(super) has_even_weights: bool,
}

/// A pass, with the end of its layers.
#[derive(Debug, Clone, Copy)]
struct PassEnd {
    sequence_id: Option<u32>,
    phase: Phase,
    end: usize,
}

/// A layer of a pass, with the ends of its rows and of their experts.
#[derive(Debug, Clone, Copy, Default)]
struct LayerEnd {
    layer: LayerId,
    rows: usize,
    ids: usize,
}

/// One walk over the layers, for a batch of a prompt or for one token.
#[derive(Debug, Clone, Copy)]
pub struct RoutedPass<'r> {
    /// Number of the sequence. Tokens of no known sequence have a number that no sequence of the trace has.
    pub sequence_id: u32,
    /// Phase of its tokens.
    pub phase: Phase,
    routes: &'r Routes,
    /// The layer before the first.
    before: LayerEnd,
    layers: &'r [LayerEnd],
}

/// What one layer routes in a pass.
#[derive(Debug, Clone, Copy)]
pub struct Chosen<'r> {
    /// Layer.
    pub layer: LayerId,
    /// Experts of a row.
    pub k: usize,
    /// Position of each row in its sequence.
    pub positions: &'r [u32],
    /// Experts `(row, k)`, best first.
    pub ids: &'r [i32],
    /// Their weights `(row, k)`.
    pub weights: &'r [f32],
}

impl Routes {
    /// The passes in order.
    pub fn passes(&self) -> impl Iterator<Item = RoutedPass<'_>> {
        let mut begin = 0usize;
        let unknown = self.unused_sequence();
        self.passes.iter().map(move |pass| {
            let before = begin.checked_sub(1).map(|last| self.layers[last]);
            let layers = &self.layers[begin..pass.end];
            begin = pass.end;
            RoutedPass {
                sequence_id: pass.sequence_id.unwrap_or(unknown),
                phase: pass.phase,
                routes: self,
                before: before.unwrap_or_default(),
                layers,
            }
        })
    }

    /// The lowest number that no sequence has.
    fn unused_sequence(&self) -> u32 {
        let known = self.passes.iter().filter_map(|pass| pass.sequence_id);
        let known: BTreeSet<u32> = known.collect();
        let free = (0..).zip(&known).find(|&(n, &sequence)| n != sequence);
        free.map_or(known.len() as u32, |(n, _)| n)
    }

    /// Experts of a token in each layer.
    pub fn n_expert_used(&self) -> &BTreeMap<LayerId, usize> {
        &self.k
    }

    /// Whether the trace lacked weights, so that all experts of a token weigh the same.
    pub fn has_even_weights(&self) -> bool {
        self.has_even_weights
    }

    /// Whether a pass begins with `layer` in a pass of this request and phase: one of these is another than before, or the layers
    /// begin anew.
    pub(super) fn begins_pass(
        &self,
        (sequence_id, phase): (Option<u32>, Phase),
        layer: LayerId,
    ) -> bool {
        match (self.passes.last(), self.layers.last()) {
            (Some(pass), Some(last)) => {
                pass.sequence_id != sequence_id || pass.phase != phase || layer <= last.layer
            }
            _ => true,
        }
    }

    /// Adds rows `(position, experts, weights)` that a layer routes together.
    pub(super) fn push<'t>(
        &mut self,
        pass: (Option<u32>, Phase),
        layer: LayerId,
        rows: impl Iterator<Item = (u32, &'t [i32], &'t [f32])>,
    ) {
        let begins = self.begins_pass(pass, layer);
        for (position, ids, weights) in rows {
            self.positions.push(position);
            self.ids.extend_from_slice(ids);
            self.weights.extend_from_slice(weights);
        }
        if begins {
            self.passes.push(PassEnd {
                sequence_id: pass.0,
                phase: pass.1,
                end: 0,
            });
        }
        self.layers.push(LayerEnd {
            layer,
            rows: self.positions.len(),
            ids: self.ids.len(),
        });
        if let Some(pass) = self.passes.last_mut() {
            pass.end = self.layers.len();
        }
    }
}

impl<'r> RoutedPass<'r> {
    /// Its layers.
    pub fn layers(&self) -> impl Iterator<Item = Chosen<'r>> + use<'r> {
        let (routes, mut from) = (self.routes, self.before);
        self.layers.iter().map(move |&to| {
            let (rows, ids) = (from.rows..to.rows, from.ids..to.ids);
            from = to;
            Chosen {
                layer: to.layer,
                k: ids.len() / rows.len().max(1),
                positions: &routes.positions[rows],
                ids: &routes.ids[ids.clone()],
                weights: &routes.weights[ids],
            }
        })
    }
}
