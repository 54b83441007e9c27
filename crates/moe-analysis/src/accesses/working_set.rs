//! Working sets: distinct bytes read in a window of tokens.

use super::{Event, PassTokens};

/// Distinct bytes that windows of generated tokens read: the size of a cache in which nothing is read twice within a window.
///
/// Windows do not overlap. An incomplete last window is omitted. An expert counts with the bytes of all its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkingSet {
    /// Window length in generated tokens.
    pub tokens: u64,
    /// Number of complete windows.
    pub windows: u64,
    /// Sum of the distinct bytes of all windows.
    pub sum_bytes: u64,
    /// Minimum distinct bytes of a window; 0 without windows.
    pub min_bytes: u64,
    /// Maximum distinct bytes of a window.
    pub max_bytes: u64,
    /// Sum of the distinct experts (layer, expert) of all windows.
    pub sum_experts: u64,
}

impl WorkingSet {
    /// Mean distinct bytes of a window; `None` without windows.
    pub fn mean_bytes(&self) -> Option<f64> {
        (self.windows > 0).then(|| self.sum_bytes as f64 / self.windows as f64)
    }

    /// Mean number of distinct experts of a window in all layers; `None` without windows.
    pub fn mean_experts(&self) -> Option<f64> {
        (self.windows > 0).then(|| self.sum_experts as f64 / self.windows as f64)
    }
}

pub(super) struct WindowCounter {
    set: WorkingSet,
    /// `[n_units]`: number of the last window that read the unit, from 1; 0 if no window has.
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

    /// Counts an access to a unit of `size_bytes` bytes.
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
