//! Products of a matrix with one or several rows of activations.
//!
//! For at most [`MAX_STREAMED`] tokens, kernels stream the weights: they read each row once and multiply it with all
//! activations. For more tokens (GEMM), a few rows of weights are decoded into a panel once and multiplied with all
//! activations. A panel contains a section of the rows' elements, so that it fits in the cache.

/// Maximum rows of activations for kernels that stream. With more rows, decoding the weights into a panel is faster.
pub const MAX_STREAMED: usize = 4;

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

impl<'a> Product<'a> {
    /// Number of rows of weights; 0 if a row has no bytes.
    pub fn n_rows(&self) -> usize {
        self.rows.len().checked_div(self.row_size).unwrap_or(0)
    }

    /// Calls `dot` on `R` rows at a time and passes their products with tokens `first_token` to `first_token + T - 1` to `put`.
    ///
    /// The rows are in `R` equal parts of the matrix, and each part is read in order. So the memory system sees `R` long
    /// sequential streams. If `R` does not divide the number of rows, the last parts overlap.
    #[inline(always)]
    pub(super) fn stream<const R: usize, const T: usize>(
        &self,
        first_token: usize,
        put: &mut Put,
        dot: impl Fn([&'a [u8]; R]) -> [[f32; T]; R],
    ) {
        const STEPS: usize = 16;
        let n_rows = self.n_rows();
        let steps = n_rows.div_ceil(R);
        let starts: [usize; R] = std::array::from_fn(|part| (part * steps).min(n_rows - steps));
        let mut products = [[[0.0; T]; R]; STEPS];
        for first in (0..steps).step_by(STEPS) {
            let products = &mut products[..STEPS.min(steps - first)];
            for (i, products) in products.iter_mut().enumerate() {
                let at = |start| (start + first + i) * self.row_size;
                *products = dot(starts.map(|start| &self.rows[at(start)..][..self.row_size]));
            }
            for (part, start) in starts.iter().enumerate() {
                for token in 0..T {
                    let mut sums = [0.0; STEPS];
                    for (sum, products) in sums.iter_mut().zip(&*products) {
                        *sum = products[part][token];
                    }
                    put(first_token + token, start + first, &sums[..products.len()]);
                }
            }
        }
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
