//! Observers of the routing during a session.

use moe_trace::LayerId;

/// The routing decisions of a layer for the tokens of a batch.
pub struct Routed<'a> {
    /// Layer.
    pub layer: LayerId,
    /// Position of each token in its sequence.
    pub positions: &'a [u32],
    /// Router logits including the bias, before any softmax, `(token, n_expert)`. Empty if the engine does not report them.
    pub logits: &'a [f32],
    /// Selected experts `(token, n_expert_used)`, best first.
    pub ids: &'a [i32],
    /// Their weights as applied, `(token, n_expert_used)`.
    pub weights: &'a [f32],
    /// Number of selected experts for a token.
    pub n_expert_used: usize,
}

/// Callback after the router of each layer.
pub type Observer<'a> = Box<dyn FnMut(&Routed) + 'a>;
