//! Distinct bytes of a window of tokens.

use super::{Event, PassTokens};

/// Distinct bytes that windows of generated tokens touch: what a cache must hold for nothing to be read twice in a window.
///
/// Windows follow one another without overlap; the last one, if it is not full, is left out. An expert counts with all its
/// tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkingSet {
    /// Generated tokens in a window.
    pub tokens: u64,
    /// Full windows.
    pub windows: u64,
    /// Sum of their distinct bytes.
    pub sum_bytes: u64,
    /// The fewest distinct bytes of a window.
    pub min_bytes: u64,
    /// The most.
    pub max_bytes: u64,
    /// Sum of the distinct (layer, expert) of all windows.
    pub sum_experts: u64,
}

impl WorkingSet {
    /// Distinct bytes of a window on average; `None` where no window was full.
    pub fn mean_bytes(&self) -> Option<f64> {
        (self.windows > 0).then(|| self.sum_bytes as f64 / self.windows as f64)
    }

    /// Distinct experts of a window on average, those of all layers together.
    pub fn mean_experts(&self) -> Option<f64> {
        (self.windows > 0).then(|| self.sum_experts as f64 / self.windows as f64)
    }
}

pub(super) struct WindowCounter {
    set: WorkingSet,
    /// For each unit the window that touched it last, counted from 1.
    touched: Vec<u64>,
    tokens: u64,
    bytes: u64,
    experts: u64,
}

impl WindowCounter {
    pub(super) fn new(tokens: u64, n_units: usize) -> Self {
        let set = WorkingSet {
            tokens: tokens.max(1),
            windows: 0,
            sum_bytes: 0,
            min_bytes: u64::MAX,
            max_bytes: 0,
            sum_experts: 0,
        };
        Self {
            set,
            touched: vec![0; n_units],
            tokens: 0,
            bytes: 0,
            experts: 0,
        }
    }

    /// `size_bytes` is the unit's.
    pub(super) fn access(&mut self, event: &Event, size_bytes: u64) {
        let window = self.set.windows + 1;
        let Some(touched) = self.touched.get_mut(event.unit) else {
            return;
        };
        if std::mem::replace(touched, window) != window {
            self.bytes = self.bytes.saturating_add(size_bytes);
            self.experts += u64::from(event.is_expert);
        }
    }

    pub(super) fn end_pass(&mut self, pass: &PassTokens) {
        self.tokens = self.tokens.saturating_add(pass.n_tokens.max(1));
        if self.tokens < self.set.tokens {
            return;
        }
        let set = &mut self.set;
        set.windows += 1;
        set.sum_bytes = set.sum_bytes.saturating_add(self.bytes);
        set.min_bytes = set.min_bytes.min(self.bytes);
        set.max_bytes = set.max_bytes.max(self.bytes);
        set.sum_experts += self.experts;
        (self.tokens, self.bytes, self.experts) = (0, 0, 0);
    }

    pub(super) fn finish(mut self) -> WorkingSet {
        if self.set.windows == 0 {
            self.set.min_bytes = 0;
        }
        self.set
    }
}
