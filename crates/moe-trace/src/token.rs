//! Token identity in rows of routing, where each row is one expert of one token in one layer.
//!
//! A token is identified by its sequence, its position and the layer. The slot does not identify it: a token may have no expert
//! in slot 0, for example in the dump of one expert-parallel rank, where the experts of the other ranks are missing.

use moe_ids::{LayerId, TokenId};

use crate::phase::Phase;

/// A token in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenKey {
    /// Layer.
    pub layer_id: LayerId,
    /// Sequence; `None` if unknown.
    pub sequence_id: Option<u32>,
    /// Position in the sequence.
    pub token_id: TokenId,
    /// Phase; `None` if unknown.
    pub phase: Option<Phase>,
    /// Start of the operation in nanoseconds; 0 if unknown.
    pub timestamp_ns: u64,
}

/// Finds the first row of each token. The rows of a token are consecutive, slots ascending.
///
/// A repeated or descending slot starts another token of the same key: tokens of several sequences that the trace does not
/// distinguish.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenStarts {
    first: Option<(TokenKey, u32)>,
    last: Option<(TokenKey, u32)>,
}

impl TokenStarts {
    /// Takes the next row; returns whether it is the first row of a token.
    #[inline]
    pub fn is_start(&mut self, token: TokenKey, slot: u32) -> bool {
        let row = (token, slot);
        self.first.get_or_insert(row);
        let before = self.last.replace(row);
        !before.is_some_and(|before| continues(before, row))
    }

    /// Appends the rows of `later`. Returns whether its first row belongs to the last token of `self`.
    pub fn append(&mut self, later: TokenStarts) -> bool {
        let is_cut = match (self.last, later.first) {
            (Some(before), Some(row)) => continues(before, row),
            _ => false,
        };
        self.first = self.first.or(later.first);
        self.last = later.last.or(self.last);
        is_cut
    }
}

/// Whether a row belongs to the same token as the preceding row.
fn continues((token, slot): (TokenKey, u32), next: (TokenKey, u32)) -> bool {
    token == next.0 && slot < next.1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(token_id: u32, sequence_id: Option<u32>) -> TokenKey {
        TokenKey {
            layer_id: LayerId(3),
            sequence_id,
            token_id: TokenId(token_id),
            phase: Some(Phase::Prompt),
            timestamp_ns: 0,
        }
    }

    /// Tokens 0 (slots 1, 2), 1 (slot 3), 1 of another sequence (slot 3) and 1 again (slots 0, 3).
    #[test]
    fn finds_tokens_without_a_slot_0() {
        let rows = [
            (token(0, None), 1),
            (token(0, None), 2),
            (token(1, None), 3),
            (token(1, Some(4)), 3),
            (token(1, Some(4)), 0),
            (token(1, Some(4)), 3),
        ];
        let starts = [true, false, true, true, true, false];
        let mut all = TokenStarts::default();
        assert_eq!(rows.map(|(token, slot)| all.is_start(token, slot)), starts);
        for cut in 0..=rows.len() {
            let [mut before, mut after] = [TokenStarts::default(); 2];
            rows[..cut].iter().for_each(|&(token, slot)| {
                before.is_start(token, slot);
            });
            rows[cut..].iter().for_each(|&(token, slot)| {
                after.is_start(token, slot);
            });
            let is_cut = starts.get(cut) == Some(&false);
            assert_eq!(before.append(after), is_cut, "cut at {cut}");
            assert_eq!(before, all, "cut at {cut}");
        }
    }
}
