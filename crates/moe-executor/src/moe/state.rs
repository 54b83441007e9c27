//! The buffers of a MoE layer.

use super::latent::LatentState;
use crate::activation::Activation;
use crate::buffers::Inventory;
use crate::ffn::FfnState;
use crate::ops::RouterState;
use crate::recorder::Routing;

/// Buffers of a MoE layer, shared by all layers.
pub struct MoeState {
    pub(crate) router: RouterState,
    pub(super) gate: Activation,
    pub(super) up: Activation,
    pub(super) down: Activation,
    /// Inputs of the selected experts, multiplied by their weights `(token, slot, n_embd)`.
    pub(super) weighted: Activation,
    pub(super) ffn: FfnState,
    pub(super) shared: SharedState,
    pub(super) latent: LatentState,
    pub(super) routing: Routing,
}

/// Buffers of a shared expert.
pub(super) struct SharedState {
    /// Score of each token `(token, 1)`.
    pub(super) score: Activation,
    /// Sigmoid of the score `(token, 1)`.
    pub(super) weight: Activation,
    /// Weighted sum of the selected experts `(token, n_embd)`.
    pub(super) routed: Activation,
    /// Output of the shared expert `(token, n_embd)`.
    pub(super) out: Activation,
}

impl MoeState {
    /// Buffers whose ids start at `first_id`.
    pub fn new(first_id: u64) -> MoeState {
        let buffer = |i| Activation::new(first_id + i);
        MoeState {
            router: RouterState::new(first_id),
            gate: buffer(3),
            up: buffer(4),
            down: buffer(5),
            weighted: buffer(14),
            ffn: FfnState::new(first_id + 6),
            shared: SharedState {
                score: buffer(8),
                weight: buffer(9),
                routed: buffer(10),
                out: buffer(11),
            },
            latent: LatentState::new(first_id + 12),
            routing: Routing::default(),
        }
    }
}

impl MoeState {
    /// The routing decisions of the layer that ran last.
    #[cfg(test)]
    pub(crate) fn routing(&self) -> &Routing {
        &self.routing
    }

    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        self.router.buffers(inventory);
        self.routing.buffers(inventory);
        self.ffn.buffers(inventory);
        inventory.activation("expert gate", &self.gate);
        inventory.activation("expert up", &self.up);
        inventory.activation("expert down", &self.down);
        inventory.activation("weighted inputs of experts", &self.weighted);
        inventory.activation("shared expert score", &self.shared.score);
        inventory.activation("shared expert weight", &self.shared.weight);
        inventory.activation("sum of the selected experts", &self.shared.routed);
        inventory.activation("shared expert", &self.shared.out);
        self.latent.buffers(inventory);
    }
}
