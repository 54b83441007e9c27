//! Similarity of consecutive tokens of a sequence in one layer.

use moe_trace::{ExpertId, TokenId};

/// Maximum number of interleaved sequences per layer whose last token is kept.
const MAX_OPEN: usize = 64;

/// Statistics of consecutive tokens in a layer: positions p and p + 1 of one sequence.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenPairs {
    /// Number of pairs.
    pub pairs: u64,
    /// Number of experts that the second tokens of the pairs selected.
    pub selected: u64,
    /// Number of these experts that the first token of the pair selected too.
    pub shared: u64,
    /// Number of pairs whose top-1 experts (slot 0) are known.
    pub known_first: u64,
    /// Number of these pairs with equal top-1 experts.
    pub same_first: u64,
    /// Number of pairs whose top-2 experts (slots 0 and 1) are known.
    pub known_first_two: u64,
    /// Number of these pairs with a common expert among their top-2 experts.
    pub same_first_two: u64,
    open: Vec<Last>,
}

/// Last token of a sequence.
#[derive(Debug, Clone, PartialEq)]
struct Last {
    sequence: (usize, Option<u32>),
    token_id: TokenId,
    experts: Vec<ExpertId>,
    top_two: [Option<ExpertId>; 2],
}

impl TokenPairs {
    /// Adds a token. `experts` are in the order of the slots. `top_two` are the experts of slots 0 and 1; `None` if the
    /// trace lacks the slot.
    pub(super) fn add(
        &mut self,
        sequence: (usize, Option<u32>),
        token_id: TokenId,
        experts: &[(ExpertId, f64)],
        top_two: [Option<ExpertId>; 2],
    ) {
        let known = self.open.iter().position(|last| last.sequence == sequence);
        let Some(at) = known else {
            if self.open.len() == MAX_OPEN {
                self.open.remove(0);
            }
            self.open.push(Last {
                sequence,
                token_id,
                experts: experts.iter().map(|&(expert, _)| expert).collect(),
                top_two,
            });
            return;
        };
        let last = &mut self.open[at];
        if last.token_id.0.checked_add(1) == Some(token_id.0) {
            let is_shared = |&&(expert, _): &&(ExpertId, f64)| last.experts.contains(&expert);
            self.pairs += 1;
            self.selected += experts.len() as u64;
            self.shared += experts.iter().filter(is_shared).count() as u64;
            if let ([Some(first), _], [Some(last_first), _]) = (top_two, last.top_two) {
                self.known_first += 1;
                self.same_first += u64::from(first == last_first);
            }
            // A token with one expert has one top-2 expert.
            let is_known = |top_two: [Option<ExpertId>; 2], n: usize| {
                top_two[0].is_some() && (top_two[1].is_some() || n == 1)
            };
            if is_known(top_two, experts.len()) && is_known(last.top_two, last.experts.len()) {
                let is_same = |expert: &ExpertId| last.top_two.contains(&Some(*expert));
                self.known_first_two += 1;
                self.same_first_two += u64::from(top_two.iter().flatten().any(is_same));
            }
        }
        last.token_id = token_id;
        last.top_two = top_two;
        last.experts.clear();
        last.experts
            .extend(experts.iter().map(|&(expert, _)| expert));
        // Moves the sequence to the end: the list is ordered by last use.
        if at + 1 < self.open.len() {
            self.open[at..].rotate_left(1);
        }
    }

    /// Adds the statistics of another layer.
    pub fn merge(&mut self, other: &TokenPairs) {
        self.pairs += other.pairs;
        self.selected += other.selected;
        self.shared += other.shared;
        self.known_first += other.known_first;
        self.same_first += other.same_first;
        self.known_first_two += other.known_first_two;
        self.same_first_two += other.same_first_two;
    }

    /// Fraction of a token's experts that the previous token selected too; k / N for a uniform router. It is the hit rate of
    /// a cache that holds the experts of one token.
    ///
    /// Source: the "previous token" predictor of BigMoeOnEdge.
    pub fn overlap(&self) -> Option<f64> {
        ratio(self.shared, self.selected)
    }

    /// Fraction of pairs with the same top-1 expert; 1 / N for a uniform router.
    ///
    /// Source: "First choice" in table 5 of the Mixtral paper (Jiang et al. 2024, <https://arxiv.org/abs/2401.04088>).
    pub fn repeat_first(&self) -> Option<f64> {
        ratio(self.same_first, self.known_first)
    }

    /// Fraction of pairs with a common expert among their top-2 experts; 1 − C(N−2, 2) / C(N, 2) for a uniform router, which
    /// is 46 % for N = 8.
    ///
    /// Source: "First or second choice" in the same table.
    pub fn repeat_first_two(&self) -> Option<f64> {
        ratio(self.same_first_two, self.known_first_two)
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(tokens: &[(u32, u32, [u32; 3])]) -> TokenPairs {
        let mut order = TokenPairs::default();
        for &(sequence, token, experts) in tokens {
            let experts = experts.map(ExpertId);
            let top_two = [Some(experts[0]), Some(experts[1])];
            order.add(
                (1, Some(sequence)),
                TokenId(token),
                &experts.map(|expert| (expert, 0.0)),
                top_two,
            );
        }
        order
    }

    /// Pairs: 1 2 3 → 1 4 5 (1 shared, same top-1), 1 4 5 → 5 1 4 (3 shared, common top-2), then a gap in the positions.
    #[test]
    fn counts_pairs() {
        let tokens = [
            (0, 0, [1, 2, 3]),
            (0, 1, [1, 4, 5]),
            (0, 2, [5, 1, 4]),
            (0, 9, [5, 1, 4]),
        ];
        let order = order(&tokens);
        assert_eq!((order.pairs, order.selected, order.shared), (2, 6, 4));
        assert_eq!(order.repeat_first(), Some(0.5));
        assert_eq!(order.repeat_first_two(), Some(1.0));
        assert_eq!(order.overlap(), Some(4.0 / 6.0));
    }

    #[test]
    fn distinguishes_interleaved_sequences() {
        let tokens = [
            (0, 0, [1, 2, 3]),
            (7, 0, [4, 5, 6]),
            (0, 1, [1, 2, 3]),
            (7, 1, [6, 5, 4]),
        ];
        let order = order(&tokens);
        assert_eq!((order.pairs, order.shared, order.same_first), (2, 6, 1));
    }

    /// Position 1 of an unknown sequence does not follow position 0 of sequence 0.
    #[test]
    fn unknown_sequence_is_not_sequence_0() {
        let mut order = TokenPairs::default();
        for (sequence, token_id) in [(Some(0), 0), (None, 1), (None, 2)] {
            order.add(
                (1, sequence),
                TokenId(token_id),
                &[(ExpertId(7), 0.0)],
                [Some(ExpertId(7)), None],
            );
        }
        assert_eq!((order.pairs, order.shared), (1, 1));
    }

    /// Tokens of a rank that lacks slot 0 of the second token and slot 1 of the fourth.
    #[test]
    fn missing_slots_are_not_top_experts() {
        let mut order = TokenPairs::default();
        let tokens = [
            ([1, 2], [Some(1), Some(2)]),
            ([1, 3], [None, Some(1)]),
            ([1, 3], [Some(1), Some(3)]),
            ([1, 4], [Some(1), None]),
        ];
        for (token_id, (experts, top_two)) in (0..).map(TokenId).zip(tokens) {
            let experts = experts.map(|expert| (ExpertId(expert), 0.0));
            let top_two = top_two.map(|expert| expert.map(ExpertId));
            order.add((1, Some(0)), token_id, &experts, top_two);
        }
        assert_eq!((order.pairs, order.shared), (3, 4));
        assert_eq!((order.known_first, order.same_first), (1, 1));
        assert_eq!((order.known_first_two, order.same_first_two), (0, 0));
        assert_eq!(order.repeat_first_two(), None);
    }

    #[test]
    fn ratios_are_none_without_pairs() {
        assert_eq!(order(&[(0, 0, [1, 2, 3])]).overlap(), None);
    }

    #[test]
    fn memory_is_bounded() {
        let (mut order, expert) = (TokenPairs::default(), ExpertId(1));
        for sequence in 0..1000 {
            order.add(
                (1, Some(sequence)),
                TokenId(0),
                &[(expert, 0.0)],
                [Some(expert), None],
            );
        }
        assert_eq!(order.open.len(), MAX_OPEN);
        order.add(
            (1, Some(999)),
            TokenId(1),
            &[(expert, 0.0)],
            [Some(expert), None],
        );
        assert_eq!(order.pairs, 1);
    }
}
