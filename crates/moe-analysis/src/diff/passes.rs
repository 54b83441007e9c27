//! Passes of a trace, and matching of the passes of two traces by their tokens.

use std::collections::BTreeSet;
use std::ops::Range;

use moe_trace::{Phase, Run};

/// The recorded operations of a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DiffPass {
    /// Sequence; `None` if the records do not contain it.
    pub sequence_id: Option<u32>,
    pub phase: Option<Phase>,
    /// Positions in the sequence.
    pub tokens: Range<u64>,
    /// Records in the trace.
    pub records: Range<u64>,
}

impl DiffPass {
    fn key(&self) -> (Option<u32>, Option<Phase>, u64) {
        (self.sequence_id, self.phase, self.tokens.start)
    }
}

/// Passes of a run, sorted by sequence, phase and position.
///
/// An operation belongs to the previous pass if it has the same sequence and phase and starts at one of the pass's
/// positions. A plain v4 record contains no sequence, which stays unknown, and no batch size, which is taken as one token.
pub(super) fn passes(run: &Run) -> Vec<DiffPass> {
    let mut passes: Vec<DiffPass> = Vec::new();
    for operation in run.trace.operations() {
        let head = operation.head();
        let (sequence_id, n_tokens) = if head.has_extension() {
            (Some(head.sequence_id.get()), head.n_tokens.get().max(1))
        } else {
            (None, 1)
        };
        let first = u64::from(head.token_id.get());
        let tokens = first..first + u64::from(n_tokens);
        let end = operation.first_record() + operation.records().len() as u64;
        match passes.last_mut() {
            Some(pass)
                if (pass.sequence_id, pass.phase) == (sequence_id, head.phase())
                    && pass.tokens.contains(&first) =>
            {
                pass.tokens.end = pass.tokens.end.max(tokens.end);
                pass.records.end = end;
            }
            _ => passes.push(DiffPass {
                sequence_id,
                phase: head.phase(),
                tokens,
                records: operation.first_record()..end,
            }),
        }
    }
    passes.sort_by_key(DiffPass::key);
    passes
}

/// If one trace contains no sequence numbers and the other one exactly one, assigns that number to both.
///
/// # Errors
/// The number of sequences of the other trace, if it has several: tokens cannot be matched.
pub(super) fn name_sequence(passes: &mut [Vec<DiffPass>; 2], side: usize) -> Result<(), usize> {
    let [of, other] = [side, 1 - side].map(|side| {
        let sequences = passes[side].iter().map(|pass| pass.sequence_id);
        sequences.collect::<BTreeSet<_>>()
    });
    if of.iter().any(Option::is_some) || other.iter().all(Option::is_none) {
        return Ok(());
    }
    if other.len() > 1 {
        return Err(other.len());
    }
    let sequence_id = other.first().copied().flatten();
    for pass in &mut passes[side] {
        pass.sequence_id = sequence_id;
    }
    Ok(())
}

/// The smallest sets of passes of both traces that evaluate the same positions. One set is empty if the other trace does not
/// evaluate these positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step<'p> {
    /// `[A, B]`
    pub passes: [&'p [DiffPass]; 2],
}

/// Iterates over the matching passes of two traces.
pub(super) struct Steps<'p> {
    /// Remaining passes, `[A, B]`.
    rest: [&'p [DiffPass]; 2],
}

impl<'p> Steps<'p> {
    pub fn new(a: &'p [DiffPass], b: &'p [DiffPass]) -> Self {
        Steps { rest: [a, b] }
    }
}

impl<'p> Iterator for Steps<'p> {
    type Item = Step<'p>;

    fn next(&mut self) -> Option<Step<'p>> {
        let first = self.rest.iter().filter_map(|rest| rest.first());
        let first = first.min_by_key(|pass| pass.key())?;
        let mut end = first.tokens.end;
        let mut n = [0, 0];
        // An added pass may extend the range, which may add passes of the other trace.
        loop {
            let before = n;
            for (rest, n) in self.rest.iter().zip(&mut n) {
                while let Some(pass) = rest.get(*n)
                    && (pass.sequence_id, pass.phase) == (first.sequence_id, first.phase)
                    && pass.tokens.start < end
                {
                    end = end.max(pass.tokens.end);
                    *n += 1;
                }
            }
            if n == before {
                break;
            }
        }
        let [a, b] = self.rest;
        let ((a, rest_a), (b, rest_b)) = (a.split_at(n[0]), b.split_at(n[1]));
        self.rest = [rest_a, rest_b];
        Some(Step { passes: [a, b] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(sequence_id: u32, phase: u8, tokens: Range<u64>) -> DiffPass {
        DiffPass {
            sequence_id: Some(sequence_id),
            phase: Phase::from_number(phase),
            tokens,
            records: 0..0,
        }
    }

    fn sizes(a: &[DiffPass], b: &[DiffPass]) -> Vec<[usize; 2]> {
        let steps = Steps::new(a, b);
        steps
            .map(|step| step.passes.map(<[DiffPass]>::len))
            .collect()
    }

    #[test]
    fn merges_passes_of_different_batch_sizes() {
        let a = [pass(0, 0, 0..8), pass(0, 0, 8..10), pass(0, 1, 10..11)];
        let b = [
            pass(0, 0, 0..4),
            pass(0, 0, 4..8),
            pass(0, 0, 8..10),
            pass(0, 1, 10..11),
        ];
        assert_eq!(sizes(&a, &b), [[1, 2], [1, 1], [1, 1]]);
        // The boundaries coincide only at the end.
        let b = [pass(0, 0, 0..6), pass(0, 0, 6..10)];
        assert_eq!(sizes(&a, &b), [[2, 2], [1, 0]]);
    }

    #[test]
    fn assigns_only_sequence_of_other_trace() {
        let unknown = || {
            let pass = |start| DiffPass {
                sequence_id: None,
                ..pass(0, 0, start..start + 1)
            };
            vec![pass(0), pass(1)]
        };
        let mut passes = [unknown(), vec![pass(7, 0, 0..2)]];
        assert_eq!(name_sequence(&mut passes, 0), Ok(()));
        assert_eq!(passes[0][1].sequence_id, Some(7));
        assert_eq!(name_sequence(&mut passes, 1), Ok(()));
        let mut passes = [vec![pass(0, 0, 0..2), pass(1, 0, 0..2)], unknown()];
        assert_eq!(name_sequence(&mut passes, 0), Ok(()));
        assert_eq!(name_sequence(&mut passes, 1), Err(2));
        let mut passes = [unknown(), unknown()];
        assert_eq!(name_sequence(&mut passes, 0), Ok(()));
        assert_eq!(passes, [unknown(), unknown()]);
        let mut passes = [unknown(), vec![]];
        assert_eq!(name_sequence(&mut passes, 0), Ok(()));
    }

    #[test]
    fn unmatched_passes_form_own_steps() {
        let a = [pass(0, 0, 0..3), pass(1, 0, 0..3), pass(1, 1, 3..4)];
        let b = [pass(1, 0, 0..3), pass(2, 0, 0..3)];
        assert_eq!(sizes(&a, &b), [[1, 0], [1, 1], [1, 0], [0, 1]]);
        assert_eq!(sizes(&[], &[]), Vec::<[usize; 2]>::new());
    }
}
