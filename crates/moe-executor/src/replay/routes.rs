//! The routing decisions of a trace as forward passes.

use std::collections::{BTreeMap, BTreeSet};

use moe_trace::{ExpertId, LayerId, Phase, TokenId};

/// The routing decisions of a trace: passes in the order of the trace, each with ascending layers.
#[derive(Debug, Default)]
pub struct Routes {
    /// Experts per token, by layer.
    pub(super) k: BTreeMap<LayerId, usize>,
    /// Position of each routed token.
    positions: Vec<TokenId>,
    /// `(token, k)`, where `k` depends on the layer.
    ids: Vec<ExpertId>,
    /// `(token, k)`
    weights: Vec<f32>,
    /// Layers of all passes.
    layers: Vec<LayerEnd>,
    passes: Vec<PassEnd>,
    /// Whether expert weights are missing in the trace, so that all experts of a token have the same weight.
    pub(super) has_uniform_weights: bool,
}

/// A pass; its layers are those before index `end` and after the previous pass.
#[derive(Debug, Clone, Copy)]
struct PassEnd {
    sequence_id: Option<u32>,
    phase: Phase,
    end: usize,
}

/// A layer of a pass; its tokens and ids are those before the end indices and after the previous layer.
#[derive(Debug, Clone, Copy, Default)]
struct LayerEnd {
    layer: LayerId,
    tokens: usize,
    ids: usize,
}

/// A forward pass of a batch of a prompt, or of decoded tokens.
#[derive(Debug, Clone, Copy)]
pub struct RoutedPass<'r> {
    /// Sequence. Tokens of an unknown sequence get a number that no sequence of the trace has.
    pub sequence_id: u32,
    /// Phase of its tokens.
    pub phase: Phase,
    routes: &'r Routes,
    /// The last layer of the previous pass.
    before: LayerEnd,
    layers: &'r [LayerEnd],
}

/// The routing decisions of one layer in a pass.
#[derive(Debug, Clone, Copy)]
pub struct RoutedLayer<'r> {
    /// Layer.
    pub layer: LayerId,
    /// Experts per token.
    pub k: usize,
    /// Position of each token in its sequence.
    pub positions: &'r [TokenId],
    /// Selected experts `(token, k)`, best first.
    pub ids: &'r [ExpertId],
    /// Their weights `(token, k)`.
    pub weights: &'r [f32],
}

impl Routes {
    /// The passes in order.
    pub fn passes(&self) -> impl Iterator<Item = RoutedPass<'_>> {
        let mut start = 0usize;
        let unknown = self.unused_sequence();
        self.passes.iter().map(move |pass| {
            let before = start.checked_sub(1).map(|last| self.layers[last]);
            let layers = &self.layers[start..pass.end];
            start = pass.end;
            RoutedPass {
                sequence_id: pass.sequence_id.unwrap_or(unknown),
                phase: pass.phase,
                routes: self,
                before: before.unwrap_or_default(),
                layers,
            }
        })
    }

    /// The lowest number that no sequence of the trace has.
    fn unused_sequence(&self) -> u32 {
        let known = self.passes.iter().filter_map(|pass| pass.sequence_id);
        let known: BTreeSet<u32> = known.collect();
        let free = (0..).zip(&known).find(|&(n, &sequence)| n != sequence);
        free.map_or(known.len() as u32, |(n, _)| n)
    }

    /// Experts per token, by layer.
    pub fn n_expert_used(&self) -> &BTreeMap<LayerId, usize> {
        &self.k
    }

    /// Whether expert weights are missing in the trace, so that all experts of a token have the same weight.
    pub fn has_uniform_weights(&self) -> bool {
        self.has_uniform_weights
    }

    /// Sequence and phase of the last pass.
    pub(super) fn last_pass(&self) -> Option<(Option<u32>, Phase)> {
        let pass = self.passes.last()?;
        Some((pass.sequence_id, pass.phase))
    }

    /// Whether `layer` of this sequence and phase starts a new pass: the sequence or the phase differs from the last pass, or
    /// the layer is not above its last layer.
    pub(super) fn starts_pass(
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

    /// Adds tokens `(position, experts, weights)` that a layer computes together.
    pub(super) fn push<'t>(
        &mut self,
        pass: (Option<u32>, Phase),
        layer: LayerId,
        rows: impl Iterator<Item = (TokenId, &'t [ExpertId], &'t [f32])>,
    ) {
        let starts = self.starts_pass(pass, layer);
        for (position, ids, weights) in rows {
            self.positions.push(position);
            self.ids.extend_from_slice(ids);
            self.weights.extend_from_slice(weights);
        }
        if starts {
            self.passes.push(PassEnd {
                sequence_id: pass.0,
                phase: pass.1,
                end: 0,
            });
        }
        self.layers.push(LayerEnd {
            layer,
            tokens: self.positions.len(),
            ids: self.ids.len(),
        });
        if let Some(pass) = self.passes.last_mut() {
            pass.end = self.layers.len();
        }
    }
}

impl<'r> RoutedPass<'r> {
    /// Its layers in ascending order.
    pub fn layers(&self) -> impl Iterator<Item = RoutedLayer<'r>> + use<'r> {
        let (routes, mut from) = (self.routes, self.before);
        self.layers.iter().map(move |&to| {
            let (tokens, ids) = (from.tokens..to.tokens, from.ids..to.ids);
            from = to;
            RoutedLayer {
                layer: to.layer,
                k: ids.len() / tokens.len().max(1),
                positions: &routes.positions[tokens],
                ids: &routes.ids[ids.clone()],
                weights: &routes.weights[ids],
            }
        })
    }
}
