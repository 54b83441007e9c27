//! The routing of a layer, as an observer of a session sees it.

use moe_trace::LayerId;

/// What the router of one layer selected for the tokens of a batch.
pub struct Routed<'a> {
    /// Layer.
    pub layer: LayerId,
    /// Position of each token in its sequence.
    pub positions: &'a [u32],
    /// Router scores before any softmax, bias included `(token, n_expert)`. Empty where the engine does not report them.
    pub logits: &'a [f32],
    /// Selected experts `(token, n_expert_used)`, best first.
    pub ids: &'a [i32],
    /// Weight of each as applied `(token, n_expert_used)`.
    pub weights: &'a [f32],
    /// Selected experts of a token.
    pub n_expert_used: usize,
}

/// Called after every router.
pub type Observer<'a> = Box<dyn FnMut(&Routed) + 'a>;
