//! Observers of the routing during a session.

use moe_trace::{LayerId, Phase};

/// The sequence and the phase of a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenSequence {
    /// Sequence id, as in records.
    pub id: u32,
    /// Phase of the token.
    pub phase: Phase,
}

/// The routing decisions of a layer for the tokens of a batch.
pub struct RouterOutput<'a> {
    /// The layer.
    pub layer: LayerId,
    /// Position of each token in its sequence.
    pub positions: &'a [u32],
    /// Sequence and phase of each token. A pass may have tokens of several sequences.
    pub sequences: &'a [TokenSequence],
    /// Router logits including the bias, before any softmax: `[n_tokens][n_expert]`, flattened. Empty if the engine does not report
    /// them.
    pub logits: &'a [f32],
    /// Selected experts, best first: `[n_tokens][n_expert_used]`, flattened.
    pub ids: &'a [i32],
    /// Router weights of `ids` as applied: `[n_tokens][n_expert_used]`, flattened.
    pub weights: &'a [f32],
    /// Number of selected experts for a token.
    pub n_expert_used: usize,
}

/// Callback after the router of each layer.
pub type Observer<'a> = Box<dyn FnMut(&RouterOutput) + 'a>;
