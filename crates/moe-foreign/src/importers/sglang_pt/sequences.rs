//! The sequences that the tokens of recorded passes belong to. A dump names no requests, but the positions of their tokens.
//!
//! A pass over prompts is split by `extend_seq_lens`. A part that starts at position 0 starts a sequence. Another one continues the
//! last prompt that ended in front of it (a prompt computed in pieces), or starts a sequence whose first tokens were cached. A
//! token of a decode pass continues the sequence that ended in front of it. Of several such sequences, those that were computed
//! last have tokens, in the order of their batch; the others have ended.

use std::collections::{HashMap, HashSet, VecDeque};

/// `ForwardMode` of SGLang, as far as it shows which tokens are of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Parts of prompts.
    Extend,
    /// A token of each running sequence.
    Decode,
    /// Both.
    Mixed,
    /// Speculative decoding, or unknown.
    Other,
}

/// A sequence that may have more tokens.
#[derive(Clone, Copy, Debug)]
struct Open {
    sequence_id: u32,
    /// The last pass that had tokens of it.
    pass: u64,
    /// Whether that was a part of its prompt.
    is_prompt: bool,
}

/// Consecutive tokens of one request in a pass.
struct Part {
    first: u32,
    n_tokens: usize,
    /// The position after the last token.
    next: u32,
    /// Whether it is a token that was generated before.
    is_decode: bool,
}

/// Follows the sequences of a dump through its passes.
#[derive(Debug, Default)]
pub(super) struct Sequences {
    /// By rank, each of which has requests of its own.
    ranks: HashMap<Option<i64>, Rank>,
    n_sequences: u32,
    n_ambiguous: u64,
    n_coinciding: u64,
    /// Tokens without a position.
    n_unplaced: usize,
}

/// The sequences of a rank.
#[derive(Debug, Default)]
struct Rank {
    /// By the position of their next token; those computed first come first.
    open: HashMap<u32, Vec<Open>>,
    n_passes: u64,
}

impl Sequences {
    /// Sequences so far.
    pub(super) fn n_sequences(&self) -> u32 {
        self.n_sequences
    }

    /// Tokens that may be of another sequence: some of several sequences of one length ended, and which ones is unknown.
    pub(super) fn n_ambiguous(&self) -> u64 {
        self.n_ambiguous
    }

    /// The number of the first of `n_tokens` tokens without positions, which are counted over all passes.
    pub(super) fn first_unplaced(&mut self, n_tokens: usize) -> usize {
        let first = self.n_unplaced;
        self.n_unplaced = first.saturating_add(n_tokens);
        first
    }

    /// Tokens of unknown sequences at the position of another token of their pass.
    pub(super) fn n_coinciding(&self) -> u64 {
        self.n_coinciding
    }

    /// The sequence of each token of a pass of `rank`, whose tokens have these `positions`. `lens` are the numbers of tokens of each
    /// request; without them requests are told apart by their positions.
    pub(super) fn of_pass(
        &mut self,
        rank: Option<i64>,
        mode: Mode,
        positions: &[u32],
        lens: &[usize],
    ) -> Vec<Option<u32>> {
        if mode == Mode::Other {
            let distinct: HashSet<u32> = positions.iter().copied().collect();
            self.n_coinciding += (positions.len() - distinct.len()) as u64;
            return vec![None; positions.len()];
        }
        let rank = self.ranks.entry(rank).or_default();
        rank.n_passes += 1;
        let parts = parts(mode, positions, lens);
        let (mut running, n_ambiguous) = rank.running(&parts);
        self.n_ambiguous += n_ambiguous;
        let mut sequence_ids = Vec::with_capacity(positions.len());
        let mut continued = Vec::with_capacity(parts.len());
        for part in parts {
            let open = if part.is_decode {
                running.get_mut(&part.first).and_then(VecDeque::pop_front)
            } else {
                rank.unfinished_prompt(part.first)
            };
            let sequence_id = open.map_or(self.n_sequences, |open| open.sequence_id);
            self.n_sequences = self.n_sequences.max(sequence_id.saturating_add(1));
            sequence_ids.extend(std::iter::repeat_n(Some(sequence_id), part.n_tokens));
            let open = Open {
                sequence_id,
                pass: rank.n_passes,
                is_prompt: !part.is_decode,
            };
            continued.push((part.next, open));
        }
        for (next, open) in continued {
            rank.open.entry(next).or_default().push(open);
        }
        sequence_ids
    }
}

impl Rank {
    /// The sequences that the decode tokens of a pass continue, by position, and how many tokens may be of another one. Sequences
    /// that ended are forgotten.
    fn running(&mut self, parts: &[Part]) -> (HashMap<u32, VecDeque<Open>>, u64) {
        let mut n_wanted: HashMap<u32, usize> = HashMap::new();
        for part in parts.iter().filter(|part| part.is_decode) {
            *n_wanted.entry(part.first).or_default() += 1;
        }
        let mut running = HashMap::new();
        let mut n_ambiguous = 0;
        for (position, n_wanted) in n_wanted {
            let mut open = self.open.remove(&position).unwrap_or_default();
            let n_ended = open.len().saturating_sub(n_wanted);
            if n_ended > 0 {
                let mut passes: Vec<u64> = open.iter().map(|open| open.pass).collect();
                passes.sort_unstable();
                let (last_ended, first_running) = (passes[n_ended - 1], passes[n_ended]);
                if last_ended == first_running {
                    n_ambiguous += n_wanted as u64;
                }
                // Of sequences computed in one pass, the first ones go on.
                let mut n_of_pass = passes[n_ended..]
                    .iter()
                    .filter(|&&pass| pass == first_running)
                    .count();
                open.retain(|open| {
                    let is_of_pass = open.pass == first_running && n_of_pass > 0;
                    n_of_pass -= usize::from(is_of_pass);
                    open.pass > first_running || is_of_pass
                });
            }
            running.insert(position, VecDeque::from(open));
        }
        (running, n_ambiguous)
    }

    /// The last sequence of which a part of the prompt ended in front of `position`.
    fn unfinished_prompt(&mut self, position: u32) -> Option<Open> {
        if position == 0 {
            return None;
        }
        let open = self.open.get_mut(&position)?;
        let at = open.iter().rposition(|open| open.is_prompt)?;
        Some(open.remove(at))
    }
}

/// Splits a pass by requests.
fn parts(mode: Mode, positions: &[u32], lens: &[usize]) -> Vec<Part> {
    let mut parts = Vec::new();
    let sum = lens.iter().fold(0usize, |sum, &n| sum.saturating_add(n));
    let mut rest = positions;
    let mut lens = if sum == positions.len() {
        lens.iter()
    } else {
        [].iter()
    };
    while let Some(&first) = rest.first() {
        let n_tokens = match (mode, lens.next()) {
            (Mode::Decode, _) => 1,
            (_, Some(0)) => continue,
            (_, Some(&n)) => n,
            (_, None) => consecutive(rest),
        };
        let (part, others) = rest.split_at(n_tokens);
        rest = others;
        parts.push(Part {
            first,
            n_tokens,
            next: part.last().map_or(first, |last| last.saturating_add(1)),
            is_decode: mode == Mode::Decode || mode == Mode::Mixed && n_tokens == 1 && first > 0,
        });
    }
    parts
}

/// How many positions from the first on follow one another.
fn consecutive(positions: &[u32]) -> usize {
    let follows = |pair: &&[u32]| pair[0].checked_add(1) == Some(pair[1]);
    1 + positions.windows(2).take_while(follows).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(sequences: &mut Sequences, mode: Mode, positions: &[u32], lens: &[usize]) -> Vec<u32> {
        let ids = sequences.of_pass(None, mode, positions, lens);
        ids.into_iter().map(|id| id.unwrap_or(u32::MAX)).collect()
    }

    #[test]
    fn splits_prompts_and_continues_them_in_order() {
        for lens in [&[3, 3][..], &[]] {
            let mut sequences = Sequences::default();
            let prompts = ids(&mut sequences, Mode::Extend, &[0, 1, 2, 0, 1, 2], lens);
            assert_eq!(prompts, [0, 0, 0, 1, 1, 1]);
            for position in 3..6 {
                assert_eq!(
                    ids(&mut sequences, Mode::Decode, &[position; 2], &[]),
                    [0, 1]
                );
            }
            assert_eq!(sequences.n_ambiguous(), 0);
        }
    }

    #[test]
    fn a_prompt_computed_in_pieces_is_one_sequence() {
        let mut sequences = Sequences::default();
        assert_eq!(
            ids(&mut sequences, Mode::Extend, &[0, 1, 0, 1], &[2, 2]),
            [0, 0, 1, 1]
        );
        // The second one goes on, next to a prompt of which the first two tokens were cached.
        assert_eq!(
            ids(&mut sequences, Mode::Extend, &[2, 3, 0], &[2, 1]),
            [1, 1, 2]
        );
        assert_eq!(ids(&mut sequences, Mode::Extend, &[9, 10], &[2]), [3, 3]);
        assert_eq!(
            ids(&mut sequences, Mode::Decode, &[2, 4, 1, 11], &[]),
            [0, 1, 2, 3]
        );
    }

    #[test]
    fn sequences_of_a_mixed_pass_go_on() {
        let mut sequences = Sequences::default();
        assert_eq!(ids(&mut sequences, Mode::Extend, &[0, 1], &[2]), [0, 0]);
        assert_eq!(ids(&mut sequences, Mode::Decode, &[2], &[]), [0]);
        assert_eq!(
            ids(&mut sequences, Mode::Mixed, &[0, 1, 2, 3], &[3, 1]),
            [1, 1, 1, 0]
        );
        assert_eq!(ids(&mut sequences, Mode::Decode, &[4, 3], &[]), [0, 1]);
    }

    #[test]
    fn a_sequence_that_ended_is_not_continued() {
        let mut sequences = Sequences::default();
        assert_eq!(ids(&mut sequences, Mode::Extend, &[0, 1], &[2]), [0, 0]);
        assert_eq!(ids(&mut sequences, Mode::Extend, &[0], &[1]), [1]);
        // The first one ended.
        assert_eq!(ids(&mut sequences, Mode::Decode, &[1], &[]), [1]);
        assert_eq!(ids(&mut sequences, Mode::Decode, &[2], &[]), [1]);
        assert_eq!(sequences.n_ambiguous(), 0);
        // One of two of the same length ended: either may have.
        let mut sequences = Sequences::default();
        assert_eq!(ids(&mut sequences, Mode::Extend, &[0, 0], &[1, 1]), [0, 1]);
        assert_eq!(ids(&mut sequences, Mode::Decode, &[1], &[]), [0]);
        assert_eq!(sequences.n_ambiguous(), 1);
    }

    #[test]
    fn each_rank_has_sequences_of_its_own() {
        let mut sequences = Sequences::default();
        let mut ids = |rank, mode, positions: &[u32]| {
            let ids = sequences.of_pass(Some(rank), mode, positions, &[]);
            ids.into_iter().flatten().collect::<Vec<u32>>()
        };
        assert_eq!(ids(0, Mode::Extend, &[0, 1]), [0, 0]);
        assert_eq!(ids(1, Mode::Extend, &[0, 1]), [1, 1]);
        assert_eq!(ids(1, Mode::Decode, &[2]), [1]);
        assert_eq!(ids(0, Mode::Decode, &[2]), [0]);
        assert_eq!(ids(1, Mode::Extend, &[0]), [2]);
    }

    #[test]
    fn speculative_passes_have_no_sequences() {
        let mut sequences = Sequences::default();
        assert_eq!(
            sequences.of_pass(None, Mode::Other, &[0, 1, 1], &[]),
            [None; 3]
        );
        assert_eq!(sequences.n_coinciding(), 1);
        assert_eq!(sequences.n_sequences(), 0);
    }
}
