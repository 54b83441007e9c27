//! Counts of each layer in windows of tokens.

use moe_trace::{ExpertId, LayerId};

use std::ops::Range;

/// Maximum number of windows of a layer. If it is exceeded, pairs of windows are merged.
const MAX_WINDOWS: usize = 128;
/// Maximum number of counts in memory.
const MAX_CELLS: usize = 1 << 24;

/// Counts by layer, window and expert. All windows contain the same number of a layer's tokens, a power of two that doubles
/// when there would be too many windows. Only the last window of a layer may be shorter.
#[derive(Debug, Clone, PartialEq)]
pub struct Windows {
    size: u64,
    /// `[n_layer][window][up to n_expert]`: counts.
    counts: Vec<Vec<Vec<u32>>>,
    /// `[n_layer]`: number of tokens.
    tokens: Vec<u64>,
    n_cells: usize,
}

impl Default for Windows {
    fn default() -> Self {
        Windows {
            size: 1,
            counts: Vec::new(),
            tokens: Vec::new(),
            n_cells: 0,
        }
    }
}

impl Windows {
    /// Adds the experts of the next token of a layer. `token` counts the tokens of the layer from 0.
    pub(super) fn add(&mut self, layer: usize, token: u64, experts: &[(ExpertId, f64)]) {
        if self.counts.len() <= layer {
            self.counts.resize(layer + 1, Vec::new());
            self.tokens.resize(layer + 1, 0);
        }
        while token / self.size >= MAX_WINDOWS as u64 {
            self.double();
        }
        self.tokens[layer] = token + 1;
        let window = (token / self.size) as usize;
        let windows = &mut self.counts[layer];
        if windows.len() <= window {
            windows.resize(window + 1, Vec::new());
        }
        let counts = &mut windows[window];
        for &(expert, _) in experts {
            let expert = expert.index();
            if counts.len() <= expert {
                self.n_cells += expert + 1 - counts.len();
                counts.resize(expert + 1, 0);
            }
            counts[expert] = counts[expert].saturating_add(1);
        }
        while self.n_cells > MAX_CELLS && self.counts.iter().any(|windows| windows.len() > 1) {
            self.double();
        }
    }

    /// Doubles the window length.
    fn double(&mut self) {
        self.size *= 2;
        self.n_cells = 0;
        for windows in &mut self.counts {
            let pairs = windows.chunks_mut(2).map(|pair| match pair {
                [left, right] => sum(std::mem::take(left), right),
                [last] => std::mem::take(last),
                _ => Vec::new(),
            });
            *windows = pairs.collect();
            self.n_cells += windows.iter().map(Vec::len).sum::<usize>();
        }
    }

    /// Window length in tokens.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Number of windows of a layer.
    pub fn len(&self, layer: LayerId) -> usize {
        self.counts.get(layer.index()).map_or(0, Vec::len)
    }

    /// Whether a layer has no windows.
    pub fn is_empty(&self, layer: LayerId) -> bool {
        self.len(layer) == 0
    }

    /// Number of tokens of a layer in a range of windows.
    pub fn routed_tokens(&self, layer: LayerId, windows: &Range<usize>) -> u64 {
        let tokens = self.tokens.get(layer.index()).copied().unwrap_or(0);
        let until = |window: usize| (window as u64 * self.size).min(tokens);
        until(windows.end).saturating_sub(until(windows.start))
    }

    /// Counts of the experts of a layer in a range of windows, up to the highest selected expert id.
    pub fn counts(&self, layer: LayerId, windows: &Range<usize>) -> Vec<u64> {
        let mut sums = Vec::new();
        self.add_counts(layer, windows, &mut sums);
        sums
    }

    /// Adds the counts of a range of windows to `sums` (`[up to n_expert]`).
    pub(crate) fn add_counts(&self, layer: LayerId, windows: &Range<usize>, sums: &mut Vec<u64>) {
        let all = self.counts.get(layer.index());
        let windows = all.and_then(|all| all.get(windows.clone()));
        for counts in windows.into_iter().flatten() {
            if sums.len() < counts.len() {
                sums.resize(counts.len(), 0);
            }
            for (sum, &count) in sums.iter_mut().zip(counts) {
                *sum += u64::from(count);
            }
        }
    }

    /// Divides the windows of a layer into at most `n` spans of similar length, each with at least one window.
    pub fn spans(&self, layer: LayerId, n: usize) -> Vec<Range<usize>> {
        let len = self.len(layer);
        let n = n.min(len).max(1);
        let edge = |span: usize| span * len / n;
        (0..n).map(|span| edge(span)..edge(span + 1)).collect()
    }
}

fn sum(mut left: Vec<u32>, right: &[u32]) -> Vec<u32> {
    if left.len() < right.len() {
        left.resize(right.len(), 0);
    }
    for (sum, &count) in left.iter_mut().zip(right) {
        *sum = sum.saturating_add(count);
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(tokens: u64) -> Windows {
        let mut windows = Windows::default();
        for token in 0..tokens {
            windows.add(
                2,
                token,
                &[(ExpertId((token % 3) as u32), 0.0), (ExpertId(5), 0.0)],
            );
        }
        windows
    }

    #[test]
    fn doubling_keeps_all_counts() {
        let few = windows(7);
        assert_eq!(
            (few.size(), few.len(LayerId(2)), few.len(LayerId(0))),
            (1, 7, 0)
        );
        assert_eq!(few.counts(LayerId(2), &(1..3)), [0, 1, 1, 0, 0, 2]);
        assert_eq!(few.routed_tokens(LayerId(2), &(1..3)), 2);

        let many = windows(129);
        assert_eq!((many.size(), many.len(LayerId(2))), (2, 65));
        assert_eq!(many.counts(LayerId(2), &(0..65)), [43, 43, 43, 0, 0, 129]);
        assert_eq!(
            many.routed_tokens(LayerId(2), &(64..65)),
            1,
            "the last window is half full"
        );
        assert_eq!(many.routed_tokens(LayerId(2), &(0..65)), 129);
        assert_eq!(many.counts(LayerId(2), &(64..65)), [0, 0, 1, 0, 0, 1]);

        let long = windows(100_000);
        assert!(long.len(LayerId(2)) <= MAX_WINDOWS);
        assert_eq!(
            long.counts(LayerId(2), &(0..long.len(LayerId(2))))[5],
            100_000
        );
    }

    #[test]
    fn spans_cover_every_window_once() {
        let windows = windows(70);
        let spans = windows.spans(LayerId(2), 8);
        assert_eq!(spans.len(), 8);
        assert_eq!((spans[0].start, spans[7].end), (0, 70));
        assert!(spans.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert!(spans.iter().all(|span| (8..=9).contains(&span.len())));
        assert_eq!(
            windows.spans(LayerId(0), 8).len(),
            1,
            "a layer without windows has one empty span"
        );
    }
}
