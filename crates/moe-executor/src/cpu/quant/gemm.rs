//! Products of a matrix with many rows of activations.
//!
//! Rows of weights are decoded once into a panel, a few rows wide, that all activations pass through. A panel is cut
//! along the rows' length so that it stays in the cache.

/// A product of rows of weights with `n_tokens` rows of activations.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    /// The rows of weights.
    pub rows: &'a [u8],
    /// Bytes of a row of weights.
    pub row_size: usize,
    /// Elements of a row.
    pub n: usize,
    /// Rows of activations.
    pub n_tokens: usize,
    /// Finds converted activations by number.
    pub act: &'a (dyn Fn(usize) -> &'a [u8] + 'a),
}

impl Product<'_> {
    /// Rows of weights; 0 where a row has no bytes.
    pub fn n_rows(&self) -> usize {
        self.rows.len().checked_div(self.row_size).unwrap_or(0)
    }
}

/// Takes results: the number of the token, the first row, and the products of that and following rows.
pub type Put<'a> = dyn FnMut(usize, usize, &[f32]) + 'a;

/// Memory for panels, kept from product to product; one for each thread.
#[derive(Default)]
pub struct Scratch {
    /// Decoded weights, widened or interleaved as an instruction set likes them.
    pub(super) weights: Vec<Line>,
    /// What the integer sums of each group start at.
    pub(super) start: Vec<Line>,
    /// Scales of each group.
    pub(super) scale: Vec<Line>,
    /// Minima of each group.
    pub(super) min: Vec<Line>,
    /// A few rows of activations.
    pub(super) act: Vec<Line>,
    /// Sums of the panel's rows for all tokens.
    pub(super) sums: Vec<Line>,
}

/// A cache line, so that vectors do not straddle two.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Line(pub [u8; 64]);

/// Makes `lines` hold at least `bytes` bytes and returns their address.
pub(super) fn reserve<T>(lines: &mut Vec<Line>, bytes: usize) -> *mut T {
    let n = bytes.div_ceil(64);
    if lines.len() < n {
        lines.resize(n, Line([0; 64]));
    }
    lines.as_mut_ptr().cast()
}
