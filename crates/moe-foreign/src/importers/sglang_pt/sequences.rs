//! Derives the sequences of tokens from their positions, because a dump has no identifiers of requests.
//!
//! - A prompt pass is split into parts by `extend_seq_lens`. A part at position 0 starts a sequence. Any other part continues the
//!   last prompt that ended just before its position (chunked prefill), or starts a sequence whose first tokens were cached.
//! - A token of a decode pass continues the sequence that ended just before its position. If there are several, the most recently
//!   computed ones continue, in the order of their batch, and the others have ended.

use std::collections::{HashMap, HashSet, VecDeque};

/// `ForwardMode` of SGLang, reduced to the modes that determine sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Parts of prompts.
    Extend,
    /// One token of each running sequence.
    Decode,
    /// Parts of prompts and single tokens.
    Mixed,
    /// Speculative decoding, or unknown.
    Other,
}

/// A sequence that may continue.
#[derive(Clone, Copy, Debug)]
struct Open {
    sequence_id: u32,
    /// The last pass with tokens of the sequence.
    pass: u64,
    /// Whether that pass computed a part of its prompt.
    is_prompt: bool,
}

/// Consecutive tokens of one request in a pass.
struct Part {
    first: u32,
    n_tokens: usize,
    /// The position after the last token.
    next: u32,
    /// Whether the part is one generated token.
    is_decode: bool,
}

/// Assigns the tokens of consecutive passes to sequences.
#[derive(Debug, Default)]
pub(super) struct Sequences {
    /// By rank: each rank has its own requests.
    ranks: HashMap<Option<i64>, Rank>,
    n_sequences: u32,
    n_ambiguous: u64,
    n_coinciding: u64,
    /// Number of tokens in passes without positions.
    n_without_position: usize,
}

/// The sequences of a rank.
#[derive(Debug, Default)]
struct Rank {
    /// By the position of the next token; ordered by pass.
    open: HashMap<u32, Vec<Open>>,
    n_passes: u64,
}

impl Sequences {
    /// Number of sequences so far.
    pub(super) fn n_sequences(&self) -> u32 {
        self.n_sequences
    }

    /// Number of tokens that may belong to another sequence: some of several sequences of equal length ended, and it is unknown
    /// which.
    pub(super) fn n_ambiguous(&self) -> u64 {
        self.n_ambiguous
    }

    /// Numbers `n_tokens` tokens without positions, consecutively over all passes; returns the first number.
    pub(super) fn number_tokens(&mut self, n_tokens: usize) -> usize {
        let first = self.n_without_position;
        self.n_without_position = first.saturating_add(n_tokens);
        first
    }

    /// Number of tokens without a known sequence at the position of another token of their pass.
    pub(super) fn n_coinciding(&self) -> u64 {
        self.n_coinciding
    }

    /// The sequence of each token in a pass of `rank`, from the `positions` of the tokens. `lens` are the numbers of tokens of each
    /// request; without them, gaps in the positions separate requests.
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
    /// The sequences that the decode tokens of a pass continue, by position, and the number of tokens that may belong to another
    /// sequence. Removes sequences that ended.
    fn running(&mut self, parts: &[Part]) -> (HashMap<u32, VecDeque<Open>>, u64) {
        let mut n_at_position: HashMap<u32, usize> = HashMap::new();
        for part in parts.iter().filter(|part| part.is_decode) {
            *n_at_position.entry(part.first).or_default() += 1;
        }
        let mut running = HashMap::new();
        let mut n_ambiguous = 0;
        for (position, n_tokens) in n_at_position {
            let mut open = self.open.remove(&position).unwrap_or_default();
            let n_ended = open.len().saturating_sub(n_tokens);
            if n_ended > 0 {
                let mut passes: Vec<u64> = open.iter().map(|open| open.pass).collect();
                passes.sort_unstable();
                let (last_ended, first_running) = (passes[n_ended - 1], passes[n_ended]);
                if last_ended == first_running {
                    n_ambiguous += n_tokens as u64;
                }
                // Of the sequences in the same pass, the first ones continue.
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

    /// Removes and returns the last sequence with a part of a prompt that ended just before `position`.
    fn unfinished_prompt(&mut self, position: u32) -> Option<Open> {
        if position == 0 {
            return None;
        }
        let open = self.open.get_mut(&position)?;
        let at = open.iter().rposition(|open| open.is_prompt)?;
        Some(open.remove(at))
    }
}

/// Splits a pass into the parts of its requests.
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

/// Number of consecutive positions from the first one on.
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
    fn continues_prompts_in_the_order_of_the_batch() {
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
    fn chunked_prefill_is_one_sequence() {
        let mut sequences = Sequences::default();
        assert_eq!(
            ids(&mut sequences, Mode::Extend, &[0, 1, 0, 1], &[2, 2]),
            [0, 0, 1, 1]
        );
        // The second prompt continues; a new prompt starts at position 0.
        assert_eq!(
            ids(&mut sequences, Mode::Extend, &[2, 3, 0], &[2, 1]),
            [1, 1, 2]
        );
        // A prompt whose first nine tokens were cached.
        assert_eq!(ids(&mut sequences, Mode::Extend, &[9, 10], &[2]), [3, 3]);
        assert_eq!(
            ids(&mut sequences, Mode::Decode, &[2, 4, 1, 11], &[]),
            [0, 1, 2, 3]
        );
    }

    #[test]
    fn continues_sequences_in_a_mixed_pass() {
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
    fn does_not_continue_a_sequence_that_ended() {
        let mut sequences = Sequences::default();
        assert_eq!(ids(&mut sequences, Mode::Extend, &[0, 1], &[2]), [0, 0]);
        assert_eq!(ids(&mut sequences, Mode::Extend, &[0], &[1]), [1]);
        // The first one ended.
        assert_eq!(ids(&mut sequences, Mode::Decode, &[1], &[]), [1]);
        assert_eq!(ids(&mut sequences, Mode::Decode, &[2], &[]), [1]);
        assert_eq!(sequences.n_ambiguous(), 0);
        // One of two sequences of equal length ended; it is unknown which.
        let mut sequences = Sequences::default();
        assert_eq!(ids(&mut sequences, Mode::Extend, &[0, 0], &[1, 1]), [0, 1]);
        assert_eq!(ids(&mut sequences, Mode::Decode, &[1], &[]), [0]);
        assert_eq!(sequences.n_ambiguous(), 1);
    }

    #[test]
    fn ranks_have_separate_sequences() {
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
