//! The tokens of an operation.

use moe_engine::TokenSequence;
use moe_trace::{TensorAccessLog, TokenId};

/// The tokens of an operation, possibly of several sequences. The slices have the same length.
#[derive(Clone, Copy)]
pub struct PassTokens<'a> {
    /// Position of each token in its sequence.
    pub positions: &'a [u32],
    /// Sequence and phase of each token.
    pub sequences: &'a [TokenSequence],
}

/// A token in records.
#[derive(Clone, Copy)]
pub(super) struct RecordedToken {
    position: u32,
    sequence: TokenSequence,
}

impl<'a> PassTokens<'a> {
    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        self.positions.len()
    }

    /// Position of the first token; 0 without tokens.
    pub(super) fn first_position(&self) -> TokenId {
        TokenId(self.positions.first().copied().unwrap_or(0))
    }

    /// The first token.
    pub(super) fn first(&self) -> Option<RecordedToken> {
        self.iter().next()
    }

    /// The tokens in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = RecordedToken> + use<'a> {
        let tokens = self.positions.iter().zip(self.sequences);
        tokens.map(|(&position, &sequence)| RecordedToken { position, sequence })
    }
}

impl RecordedToken {
    /// Sets the fields of a record that identify the token.
    pub(super) fn write(self, record: &mut TensorAccessLog) {
        record.token_id.set(self.position);
        record.sequence_id.set(self.sequence.id);
        record.phase = self.sequence.phase.number();
    }
}
