//! The buffers of a pass.

use moe_engine::TokenSequence;

use crate::activation::{Activation, NodeName};
use crate::attention::AttentionState;
use crate::buffers::{Input, Inventory};
use crate::device_id::DeviceId;
use crate::ffn::FfnState;
use crate::moe::MoeState;
use crate::ops::Ops;
use crate::recurrent::{DeltaNetState, KdaState, Mamba2State, ShortConvState};

/// Buffers of a pass, shared by all layers.
pub struct State {
    /// Residual stream `(token, n_embd)`.
    pub x: Activation,
    /// Normed input of the experts or of the output, or a normed output of the attention or of a block `(token, n_embd)`.
    pub normed: Activation,
    /// Output of the attention, then of the MoE or dense block `(token, n_embd)`.
    pub block: Activation,
    /// Residual stream between attention and experts `(token, n_embd)`.
    pub ffn_inp: Activation,
    /// Output of experts next to a dense block `(token, n_embd)`.
    pub experts: Activation,
    /// Scratch for the selection of rows.
    pub kept: Activation,
    /// Logits `(wanted, n_vocab)`.
    pub logits: Activation,
    /// Buffers of the attention.
    pub attention: AttentionState,
    /// Buffers of short convolutions.
    pub short_conv: ShortConvState,
    /// Buffers of gated delta nets.
    pub delta_net: DeltaNetState,
    /// Buffers of Kimi Delta Attention.
    pub kda: KdaState,
    /// Buffers of Mamba-2 layers.
    pub mamba2: Mamba2State,
    /// Buffers of the dense blocks.
    pub dense: FfnState,
    /// Buffers of the MoE layers.
    pub moe: MoeState,
    /// Token ids of the batch.
    pub tokens: Vec<u32>,
    /// Rows whose logits are wanted, ascending.
    pub wanted: Vec<u32>,
    /// Positions and sequences of all tokens, while [`Ops`] has those of the wanted rows.
    all_tokens: (Vec<u32>, Vec<TokenSequence>),
}

impl Default for State {
    fn default() -> Self {
        State {
            x: Activation::new(1),
            normed: Activation::new(2),
            block: Activation::new(3),
            ffn_inp: Activation::new(4),
            kept: Activation::new(5),
            logits: Activation::new(6),
            experts: Activation::new(7),
            attention: AttentionState::new(32),
            dense: FfnState::new(48),
            moe: MoeState::new(64),
            short_conv: ShortConvState::new(96),
            delta_net: DeltaNetState::new(112),
            kda: KdaState::new(144),
            mamba2: Mamba2State::new(128),
            tokens: Vec::new(),
            wanted: Vec::new(),
            all_tokens: (Vec::new(), Vec::new()),
        }
    }
}

impl State {
    /// Adds its buffers to an inventory.
    pub(crate) fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("residual stream", &self.x);
        inventory.activation("block input", &self.normed);
        inventory.activation("block output", &self.block);
        inventory.activation("residual stream before the experts", &self.ffn_inp);
        inventory.activation("experts next to a dense block", &self.experts);
        inventory.activation("kept rows", &self.kept);
        inventory.activation("logits", &self.logits);
        inventory.vector(Input::Tokens.buffer_id(), "token ids", &self.tokens);
        inventory.vector(Input::Wanted.buffer_id(), "wanted rows", &self.wanted);
        self.attention.buffers(inventory);
        self.short_conv.buffers(inventory);
        self.delta_net.buffers(inventory);
        self.kda.buffers(inventory);
        self.mamba2.buffers(inventory);
        self.dense.buffers(inventory);
        self.moe.buffers(inventory);
    }

    /// Saves the tokens before [`keep_tokens`].
    pub(super) fn save_tokens(&mut self, ops: &Ops) {
        let (positions, sequences) = &mut self.all_tokens;
        positions.clone_from(&ops.positions);
        sequences.clone_from(&ops.sequences);
    }

    /// Restores the tokens before [`keep_tokens`].
    pub(super) fn restore_tokens(&mut self, ops: &mut Ops) {
        let (positions, sequences) = &mut self.all_tokens;
        std::mem::swap(positions, &mut ops.positions);
        std::mem::swap(sequences, &mut ops.sequences);
    }
}

/// Removes all tokens except those of the wanted rows, for the operations that follow.
pub(super) fn keep_tokens(ops: &mut Ops, wanted: &[u32]) {
    // Rows ascend, so each token is read before its place is overwritten.
    for (at, &row) in wanted.iter().enumerate() {
        ops.positions[at] = ops.positions[row as usize];
        ops.sequences[at] = ops.sequences[row as usize];
    }
    ops.positions.truncate(wanted.len());
    ops.sequences.truncate(wanted.len());
}

/// Removes all rows of `x` except the wanted ones.
pub(super) fn keep_rows(
    ops: &mut Ops,
    device: DeviceId,
    name: NodeName,
    x: &mut Activation,
    wanted: &[u32],
    kept: &mut Activation,
) {
    ops.get_rows(device, name, x, wanted, kept);
    x.take(kept);
}
