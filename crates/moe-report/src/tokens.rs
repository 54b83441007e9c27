//! The tokens of an input in order of execution.

use std::collections::HashMap;

use moe_trace::Phase;

use crate::document::{self, index, renumber};

/// Sequence and position of a token.
pub(crate) type TokenPlace = (u32, u32);

/// Collects tokens. A position that is computed again, for example after a warm-up, is another token.
#[derive(Debug, Default)]
pub(crate) struct TokenList {
    phase: Vec<u8>,
    places: Vec<TokenPlace>,
    start: Vec<i64>,
    /// The newest token of each place.
    newest: HashMap<TokenPlace, i32>,
    /// The first token of the current pass.
    pass: i32,
    pass_start: i64,
}

impl TokenList {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Starts a pass at this time: its tokens differ from all earlier ones.
    pub fn begin_pass(&mut self, start: i64) {
        self.pass = index(self.places.len());
        self.pass_start = start;
    }

    /// Whether the current pass contains a token at this place.
    pub fn is_in_pass(&self, place: TokenPlace) -> bool {
        self.newest(place).is_some_and(|token| token >= self.pass)
    }

    /// The token of the current pass at this place.
    pub fn in_pass(&mut self, place: TokenPlace, phase: Option<Phase>) -> i32 {
        match self.newest(place) {
            Some(token) if token >= self.pass => token,
            _ => self.add(place, phase, self.pass_start),
        }
    }

    /// The newest token at this place.
    pub fn newest(&self, place: TokenPlace) -> Option<i32> {
        self.newest.get(&place).copied()
    }

    /// Adds a token. An unknown phase becomes that of generated tokens.
    pub fn add(&mut self, place: TokenPlace, phase: Option<Phase>, start: i64) -> i32 {
        let token = index(self.places.len());
        self.phase.push(phase.unwrap_or(Phase::Generate).number());
        self.places.push(place);
        self.start.push(start);
        self.newest.insert(place, token);
        token
    }

    /// Makes all times relative to `first`.
    pub fn rebase(&mut self, first: i64) {
        for start in &mut self.start {
            *start = start.saturating_sub(first).max(0);
        }
    }

    /// Sets the start of each token to its number, for a trace without timestamps.
    pub fn count_steps(&mut self) {
        self.start = (0..).take(self.places.len()).collect();
    }

    /// Sorts the tokens by start; equal tokens keep their order. Returns the new number of each token, or `None` if the order is the
    /// same.
    pub fn sort(&mut self) -> Option<Vec<i32>> {
        if self.start.is_sorted() {
            return None;
        }
        let mut order: Vec<usize> = (0..self.len()).collect();
        order.sort_by_key(|&token| self.start.get(token).copied());
        let mut places = vec![-1; order.len()];
        for (place, &token) in order.iter().enumerate() {
            places[token] = index(place);
        }
        self.phase = order.iter().map(|&token| self.phase[token]).collect();
        self.places = order.iter().map(|&token| self.places[token]).collect();
        self.start = order.iter().map(|&token| self.start[token]).collect();
        for token in self.newest.values_mut() {
            renumber(std::slice::from_mut(token), &places);
        }
        Some(places)
    }

    /// Start and phase of each token.
    pub fn starts(&self) -> impl Iterator<Item = (i64, u8)> {
        self.start.iter().copied().zip(self.phase.iter().copied())
    }

    /// The tokens for the JSON block. `text` returns the text of the token at a sequence and a position.
    pub fn finish(self, text: impl Fn(u32, u32) -> Option<String>) -> document::Tokens {
        let (sequence, position): (Vec<u32>, Vec<u32>) = self.places.into_iter().unzip();
        let places = sequence.iter().zip(&position);
        document::Tokens {
            text: places.map(|(&s, &p)| text(s, p)).collect(),
            phase: self.phase,
            sequence,
            position,
            start: self.start,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorts_tokens_by_start() {
        let mut tokens = TokenList::default();
        tokens.add((0, 5), Some(Phase::Generate), 20);
        tokens.add((1, 6), Some(Phase::Prompt), 10);
        assert_eq!(tokens.sort(), Some(vec![1, 0]));
        assert_eq!(tokens.sort(), None);
        assert_eq!(
            (tokens.newest((0, 5)), tokens.newest((1, 6))),
            (Some(1), Some(0))
        );
        assert_eq!(tokens.starts().collect::<Vec<_>>(), [(10, 0), (20, 1)]);
    }

    #[test]
    fn position_of_a_later_pass_is_another_token() {
        let mut tokens = TokenList::default();
        tokens.begin_pass(100);
        assert_eq!(tokens.in_pass((0, 0), Some(Phase::Prompt)), 0);
        assert_eq!(tokens.in_pass((0, 1), Some(Phase::Prompt)), 1);
        assert_eq!(tokens.in_pass((0, 0), Some(Phase::Prompt)), 0);
        assert!(tokens.is_in_pass((0, 1)));
        tokens.begin_pass(300);
        assert!(!tokens.is_in_pass((0, 1)));
        assert_eq!(tokens.in_pass((0, 1), None), 2);
        assert_eq!(tokens.newest((0, 1)), Some(2));
        tokens.rebase(100);
        let tokens = tokens.finish(|_, position| (position == 1).then(|| "a".to_owned()));
        assert_eq!(tokens.start, [0, 0, 200]);
        assert_eq!(tokens.phase, [0, 0, 1]);
        assert_eq!(tokens.position, [0, 1, 1]);
        assert_eq!(
            tokens.text,
            [None, Some("a".to_owned()), Some("a".to_owned())]
        );
    }
}
