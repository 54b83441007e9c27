//! The sequences of a pass on a GPU, for kernels that update recurrent states.

use std::ops::Range;

use super::Device;
use crate::cuda::launch::Runs;
use crate::cuda::{DeviceBuffer, Result};
use crate::kv_cache::Run;

/// The sequences of the last pass.
#[derive(Default)]
pub(super) struct RunList {
    memory: Option<DeviceBuffer>,
    /// Its contents.
    values: Vec<u32>,
}

impl Device {
    /// The sequences of a pass on the GPU, in groups of different sequences: a group continues sequences of those before it. They are
    /// copied only if they have changed.
    ///
    /// # Errors
    /// They do not fit, or the copy cannot be started.
    pub(crate) fn runs(&mut self, runs: &[Run]) -> Result<Vec<Runs>> {
        let of_run = |run: &Run| [run.sequence, run.tokens.start, run.tokens.len()];
        let values = runs.iter().flat_map(of_run).map(|n| n as u32);
        let values: Vec<u32> = values.collect();
        let bytes = size_of_val(values.as_slice());
        let list = &mut self.run_list;
        let memory = match list.memory.take() {
            Some(memory) if memory.size_bytes() >= bytes => memory,
            outgrown => {
                drop(outgrown);
                list.values.clear();
                self.gpu.alloc(bytes.max(1).next_power_of_two())?
            }
        };
        let at = list.memory.insert(memory).ptr();
        if list.values != values {
            self.gpu.upload(at, values.as_slice())?;
            list.values = values;
        }
        let group = |group: Range<usize>| {
            let longest = runs[group.clone()].iter().map(|run| run.tokens.len()).max();
            Runs {
                at: at.offset(group.start * 3 * size_of::<u32>()),
                n: group.len(),
                longest: longest.unwrap_or(0),
            }
        };
        Ok(groups_of(runs).map(group).collect())
    }
}

/// Indices of consecutive runs of different sequences.
fn groups_of(runs: &[Run]) -> impl Iterator<Item = Range<usize>> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let rest = &runs[first..];
        let continues = |n: &usize| {
            let mut before = rest[..*n].iter();
            before.any(|run| run.sequence == rest[*n].sequence)
        };
        let n = (1..rest.len()).find(continues).unwrap_or(rest.len());
        first += n;
        (n > 0).then_some(first - n..first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_continues_in_the_next_group() {
        let groups = |sequences: &[usize]| {
            let run = |&sequence: &usize| Run {
                sequence,
                tokens: 0..1,
            };
            let runs: Vec<Run> = sequences.iter().map(run).collect();
            let groups = groups_of(&runs).map(|group| (group.start, group.end));
            groups.collect::<Vec<_>>()
        };
        assert!(groups(&[]).is_empty());
        assert_eq!(groups(&[5, 0, 2]), [(0, 3)]);
        assert_eq!(groups(&[1, 0, 1, 2, 0, 2]), [(0, 2), (2, 5), (5, 6)]);
    }
}
