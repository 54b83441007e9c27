//! What consecutive tokens of a sequence have in common, in one layer.

use moe_trace::{ExpertId, TokenId};

/// Sequences whose last token is remembered in a layer, at most: so many requests may be interleaved.
const MAX_OPEN: usize = 64;

/// Consecutive tokens of a layer: positions p and p + 1 of one sequence.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenPairs {
    /// Pairs of consecutive tokens.
    pub pairs: u64,
    /// Experts that the second tokens of the pairs chose.
    pub chosen: u64,
    /// Those that the first token of the pair had chosen as well.
    pub shared: u64,
    /// Pairs in which the first choice of both tokens is known.
    pub known_first: u64,
    /// Of them, those with the same first choice.
    pub same_first: u64,
    /// Pairs in which the first two choices of both tokens are known.
    pub known_first_two: u64,
    /// Of them, those that share an expert among these choices.
    pub same_first_two: u64,
    open: Vec<Last>,
}

/// The last token of a sequence.
#[derive(Debug, Clone, PartialEq)]
struct Last {
    sequence: (usize, Option<u32>),
    token_id: TokenId,
    experts: Vec<ExpertId>,
    top_two: [Option<ExpertId>; 2],
}

impl TokenPairs {
    /// Takes a token's experts, best first; `top_two` are those of slots 0 and 1, `None` if the trace lacks the slot.
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
            self.chosen += experts.len() as u64;
            self.shared += experts.iter().filter(is_shared).count() as u64;
            if let ([Some(first), _], [Some(last_first), _]) = (top_two, last.top_two) {
                self.known_first += 1;
                self.same_first += u64::from(first == last_first);
            }
            // Of a token that has one expert, it is the first two choices.
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
        // The sequences that were seen last stand last.
        if at + 1 < self.open.len() {
            self.open[at..].rotate_left(1);
        }
    }

    /// Adds the pairs of another layer.
    pub fn merge(&mut self, other: &TokenPairs) {
        self.pairs += other.pairs;
        self.chosen += other.chosen;
        self.shared += other.shared;
        self.known_first += other.known_first;
        self.same_first += other.same_first;
        self.known_first_two += other.known_first_two;
        self.same_first_two += other.same_first_two;
    }

    /// Share of a token's experts that the token before had chosen as well (k / N if tokens chose evenly and independently):
    /// what a cache of one token's experts hits (the "previous token" predictor of BigMoeOnEdge).
    pub fn overlap(&self) -> Option<f64> {
        ratio(self.shared, self.chosen)
    }

    /// Share of the pairs with the same first choice (1 / N if even): "First choice" of table 5 of the Mixtral paper
    /// (Jiang et al. 2024, arXiv 2401.04088).
    pub fn repeat_first(&self) -> Option<f64> {
        ratio(self.same_first, self.known_first)
    }

    /// Share of the pairs in which an expert is first or second choice of both tokens (1 − C(N−2, 2) / C(N, 2) if even, 46 % of
    /// eight): "First or second choice" of that table.
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

    /// Pairs: 123→145 (1 shared, first the same), 145→514 (3 shared, first two shared), then a gap in the positions.
    #[test]
    fn pairs_by_hand() {
        let tokens = [
            (0, 0, [1, 2, 3]),
            (0, 1, [1, 4, 5]),
            (0, 2, [5, 1, 4]),
            (0, 9, [5, 1, 4]),
        ];
        let order = order(&tokens);
        assert_eq!((order.pairs, order.chosen, order.shared), (2, 6, 4));
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

    /// Position 1 of no known sequence does not follow position 0 of sequence 0.
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

    /// Tokens of a rank that lacks the first choice of the second token and the second choice of the fourth.
    #[test]
    fn missing_slots_are_not_first_choices() {
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
    fn reports_nothing_without_pairs() {
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
