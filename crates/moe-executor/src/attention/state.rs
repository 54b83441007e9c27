//! The buffers of the attention.

use super::latent::LatentState;
use crate::activation::Activation;
use crate::buffers::Inventory;

/// Buffers of the attention, shared by all layers.
pub struct AttentionState {
    /// Normed input `(token, n_embd)`.
    pub(super) normed: Activation,
    /// Queries `(token, n_head * head_dim)`.
    pub(super) q: Activation,
    /// Keys `(token, n_head_kv * head_dim)`.
    pub(super) k: Activation,
    /// Values `(token, n_head_kv * value_dim)`.
    pub(super) v: Activation,
    /// Queries, keys or values before their norm, same shapes.
    pub(super) projected: Activation,
    /// Output of the heads `(token, n_head * value_dim)`.
    pub(super) heads: Activation,
    /// Queries, keys and values of one matrix, the columns in this order.
    pub(super) fused: Activation,
    /// Gates of the heads `(token, n_head * value_dim)` or `(token, n_head)`.
    pub(super) gates: Activation,
    /// Queries and gates of each head `(token, n_head * 2 head_dim)`.
    pub(super) gated_queries: Activation,
    /// Buffers of latent attention.
    pub(super) latent: LatentState,
}

impl AttentionState {
    /// Buffers whose ids start at `first_id`. Those of latent attention start at `first_id + 128`.
    pub fn new(first_id: u64) -> AttentionState {
        let buffer = |i| Activation::new(first_id + i);
        AttentionState {
            normed: buffer(0),
            q: buffer(1),
            k: buffer(2),
            v: buffer(3),
            projected: buffer(4),
            heads: buffer(5),
            fused: buffer(6),
            gates: buffer(7),
            gated_queries: buffer(8),
            latent: LatentState::new(first_id + 128),
        }
    }
}

impl AttentionState {
    /// The normed input of the layer that ran last `(token, n_embd)`.
    pub(crate) fn normed(&mut self) -> &mut Activation {
        &mut self.normed
    }

    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("attention input", &self.normed);
        inventory.activation("queries", &self.q);
        inventory.activation("keys", &self.k);
        inventory.activation("values", &self.v);
        inventory.activation("queries, keys or values before their norm", &self.projected);
        inventory.activation("attention heads", &self.heads);
        inventory.activation("queries, keys and values", &self.fused);
        inventory.activation("attention gates", &self.gates);
        inventory.activation("queries and their gates", &self.gated_queries);
        self.latent.buffers(inventory);
    }
}
