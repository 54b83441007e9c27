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

/// Slots of the first token that are kept for [`TokenStarts::append`].
const MAX_LEADING: usize = 1024;

/// Finds the first row of each token. The rows of a token are consecutive, in any order of the slots.
///
/// A repeated slot starts another token of the same key: tokens of several sequences that the trace does not distinguish.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenStarts {
    /// The key of the first row, and the slots of the rows up to the first row of another key, at most [`MAX_LEADING`].
    leading: Option<(TokenKey, Vec<u32>)>,
    /// Number of tokens in these rows.
    n_leading: usize,
    /// Whether other rows follow them.
    has_more: bool,
    /// The last token and its slots so far.
    last: Option<(TokenKey, Slots)>,
}

/// Slots of a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Slots {
    /// Bits of the slots below 128. Higher slots must ascend.
    low: u128,
    highest: u32,
}

impl Slots {
    fn of(slot: u32) -> Self {
        let mut slots = Self::default();
        slots.insert(slot);
        slots
    }

    /// Adds a slot; returns whether it is new.
    #[inline]
    fn insert(&mut self, slot: u32) -> bool {
        let is_new = match 1u128.checked_shl(slot) {
            Some(bit) => {
                let is_new = self.low & bit == 0;
                self.low |= bit;
                is_new
            }
            None => slot > self.highest,
        };
        self.highest = self.highest.max(slot);
        is_new
    }
}

impl TokenStarts {
    /// Takes the next row; returns whether it is the first row of a token.
    #[inline]
    pub fn is_start(&mut self, token: TokenKey, slot: u32) -> bool {
        let last = self.last.as_mut();
        let continues = last.is_some_and(|(last, slots)| *last == token && slots.insert(slot));
        if !continues {
            self.last = Some((token, Slots::of(slot)));
        }
        if !self.has_more {
            self.add_leading(token, slot, !continues);
        }
        !continues
    }

    fn add_leading(&mut self, token: TokenKey, slot: u32, is_start: bool) {
        let (first, slots) = self.leading.get_or_insert_with(|| (token, Vec::new()));
        if *first != token || slots.len() == MAX_LEADING {
            self.has_more = true;
            return;
        }
        slots.push(slot);
        self.n_leading += usize::from(is_start);
    }

    /// Appends the rows of `later`. Returns whether the number of tokens in both is one less than the sum of their numbers, because
    /// the first row of `later` belongs to the last token of `self`.
    pub fn append(&mut self, later: TokenStarts) -> bool {
        let Some((token, slots)) = later.leading else {
            return false;
        };
        let starts = slots.iter().filter(|&&slot| self.is_start(token, slot));
        let is_cut = starts.count() < later.n_leading;
        if later.has_more {
            self.has_more = true;
            self.last = later.last;
        }
        is_cut
    }
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

    /// Tokens 0 (slots 2, 1), 1 (slot 3), 1 of another sequence (slots 3, 0), 1 again (slots 3, 1, 0), and 1 again (slot 1).
    #[test]
    fn finds_tokens_without_a_slot_0() {
        let rows = [
            (token(0, None), 2),
            (token(0, None), 1),
            (token(1, None), 3),
            (token(1, Some(4)), 3),
            (token(1, Some(4)), 0),
            (token(1, Some(4)), 3),
            (token(1, Some(4)), 1),
            (token(1, Some(4)), 0),
            (token(1, Some(4)), 1),
        ];
        let starts = [true, false, true, true, false, true, false, false, true];
        let mut all = TokenStarts::default();
        assert_eq!(rows.map(|(token, slot)| all.is_start(token, slot)), starts);
        for cut in 0..=rows.len() {
            let [mut before, mut after] = [TokenStarts::default(), TokenStarts::default()];
            let n_before = n_tokens(&mut before, &rows[..cut]);
            let n_after = n_tokens(&mut after, &rows[cut..]);
            let is_cut = before.append(after);
            assert_eq!(n_before + n_after - usize::from(is_cut), 5, "cut at {cut}");
            assert_eq!(before, all, "cut at {cut}");
        }
    }

    fn n_tokens(starts: &mut TokenStarts, rows: &[(TokenKey, u32)]) -> usize {
        let rows = rows.iter();
        rows.filter(|(token, slot)| starts.is_start(*token, *slot))
            .count()
    }

    #[test]
    fn high_slots_must_ascend() {
        let mut starts = TokenStarts::default();
        let rows = [127, 128, 200, 5, 200].map(|slot| starts.is_start(token(0, None), slot));
        assert_eq!(rows, [true, false, false, false, true]);
    }
}
