//! Products of a matrix with several rows of activations (GEMM).
//!
//! A few rows of weights are decoded into a panel once and multiplied with all activations. A panel contains a section of the
//! rows' elements, so that it fits in the cache.

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
    /// Returns the converted activations of a token by index.
    pub act: &'a (dyn Fn(usize) -> &'a [u8] + 'a),
}

impl Product<'_> {
    /// Number of rows of weights; 0 if a row has no bytes.
    pub fn n_rows(&self) -> usize {
        self.rows.len().checked_div(self.row_size).unwrap_or(0)
    }
}

/// Receives results: index of the token, index of the first row, products of this row and the following rows.
pub type Put<'a> = dyn FnMut(usize, usize, &[f32]) + 'a;

/// Memory of a thread for panels, reused between products. The layouts depend on the instruction set.
#[derive(Default)]
pub struct Scratch {
    /// Decoded weights of the panel.
    pub(super) weights: Vec<Line>,
    /// Initial value of the integer sums, by group.
    pub(super) start: Vec<Line>,
    /// Scales, by group.
    pub(super) scale: Vec<Line>,
    /// Minima, by group.
    pub(super) min: Vec<Line>,
    /// A few rows of activations.
    pub(super) act: Vec<Line>,
    /// Sums `(token, row of the panel)`.
    pub(super) sums: Vec<Line>,
}

/// A cache line. Its alignment is that of the largest vector.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Line(pub [u8; 64]);

/// Grows `lines` to at least `bytes` bytes and returns their address.
pub(super) fn reserve<T>(lines: &mut Vec<Line>, bytes: usize) -> *mut T {
    let n = bytes.div_ceil(64);
    if lines.len() < n {
        lines.resize(n, Line([0; 64]));
    }
    lines.as_mut_ptr().cast()
}
