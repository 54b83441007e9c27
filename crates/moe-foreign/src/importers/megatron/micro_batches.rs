//! Finds the lines of a step that activation recomputation repeats.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use moe_trace::LayerId;
use xxhash_rust::xxh3::Xxh3;

/// The lines of a rank in one step, by layer, in the order of the trace.
#[derive(Default)]
pub(super) struct StepLines {
    layers: BTreeMap<LayerId, Vec<StepLine>>,
}

struct StepLine {
    /// Number of the line in the trace.
    index: usize,
    /// Hash of the experts.
    hash: u128,
}

impl StepLines {
    pub(super) fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    pub(super) fn push(&mut self, layer: LayerId, index: usize, hash: u128) {
        let lines = self.layers.entry(layer).or_default();
        lines.push(StepLine { index, hash });
    }

    /// The numbers of the lines that are recomputations; `None` if they cannot be distinguished from tokens.
    ///
    /// A recomputed line equals an earlier line of its layer. Two micro-batches with the same experts in one layer also have
    /// equal lines, so all layers are compared:
    ///
    /// - If every layer has each of its lines once, or each of its lines twice, and the layers have the same number of different
    ///   lines, then the layers with each line twice are recomputed. The order of the lines does not matter.
    /// - Otherwise, the n-th lines of all layers belong together, and they are recomputations if all of them equal earlier lines
    ///   that also belong together.
    pub(super) fn recomputed(&self) -> Option<Vec<usize>> {
        let layers: Vec<&[StepLine]> = self.layers.values().map(Vec::as_slice).collect();
        let counts: Vec<HashMap<u128, usize>> = layers.iter().map(|lines| counts(lines)).collect();
        let repeats: Vec<Vec<usize>> = layers.iter().map(|lines| repeats(lines)).collect();
        if repeats.iter().all(Vec::is_empty) {
            return Some(Vec::new());
        }
        if are_once_or_twice(&counts) {
            let of_layer = |(lines, repeats): (&&[StepLine], &Vec<usize>)| -> Vec<usize> {
                repeats.iter().map(|&n| lines[n].index).collect()
            };
            return Some(layers.iter().zip(&repeats).flat_map(of_layer).collect());
        }
        let common = common_repeats(&layers);
        if !repeats.iter().flatten().all(|n| common.contains(n)) {
            let has_same_length = layers.iter().all(|lines| lines.len() == layers[0].len());
            let has_even_counts = counts
                .iter()
                .all(|counts| counts.values().all(|n| n.is_multiple_of(2)));
            if !has_same_length || common.is_empty() && has_even_counts {
                return None;
            }
        }
        let of_layer = |lines: &&[StepLine]| -> Vec<usize> {
            let found = common.iter().filter_map(|&n| lines.get(n));
            found.map(|line| line.index).collect()
        };
        Some(layers.iter().flat_map(of_layer).collect())
    }
}

/// How often each line of a layer occurs.
fn counts(lines: &[StepLine]) -> HashMap<u128, usize> {
    let mut counts = HashMap::new();
    for line in lines {
        *counts.entry(line.hash).or_insert(0) += 1;
    }
    counts
}

/// The positions of the lines of a layer that equal an earlier one.
fn repeats(lines: &[StepLine]) -> Vec<usize> {
    let mut seen = HashSet::new();
    (0..lines.len())
        .filter(|&n| !seen.insert(lines[n].hash))
        .collect()
}

/// Whether each layer has each of its lines once, or each twice, and all layers have the same number of different lines.
fn are_once_or_twice(counts: &[HashMap<u128, usize>]) -> bool {
    let all = |counts: &HashMap<u128, usize>, n: usize| counts.values().all(|&count| count == n);
    counts
        .iter()
        .all(|of_layer| of_layer.len() == counts[0].len() && (all(of_layer, 1) || all(of_layer, 2)))
}

/// The positions whose lines equal those of one earlier position in all layers. Layers without a line at a position are ignored.
fn common_repeats(layers: &[&[StepLine]]) -> BTreeSet<usize> {
    let ends: BTreeSet<usize> = layers.iter().map(|lines| lines.len()).collect();
    let mut common = BTreeSet::new();
    let mut start = 0;
    for end in ends {
        // The layers that have lines at the positions `start..end`.
        let longer: Vec<_> = layers.iter().filter(|lines| lines.len() >= end).collect();
        let mut seen = HashSet::new();
        for n in 0..end {
            let mut hash = Xxh3::new();
            for lines in &longer {
                hash.update(&lines[n].hash.to_le_bytes());
            }
            let is_repeat = !seen.insert(hash.digest128());
            if is_repeat && n >= start {
                common.insert(n);
            }
        }
        start = end;
    }
    common
}
