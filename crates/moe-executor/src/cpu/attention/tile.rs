//! Attention of a block of tokens for query heads with the same keys and values.
//!
//! The online softmax is that of Dao et al., "FlashAttention" (2022), algorithm 1: compute the scores of a block of positions,
//! rescale the sums to the new maximum, and add the block. It needs memory for one block of scores.

use std::cell::RefCell;
use std::ops::Range;

use super::{Inputs, Rows, Shape};
use crate::cpu::disjoint::Disjoint;
use crate::cpu::simd::{Kernel, Simd, exp};

/// Positions per block.
const BLOCK: usize = 64;
/// Rows of a register tile of [`Product`]. Its sums and operands fill the vector registers.
const STEP_ROWS: usize = 6;
/// Vectors per row of a register tile.
const STEP_VECTORS: usize = 2;
/// Minimum query rows for which the keys are transposed. With fewer rows the transposition takes longer than it saves.
const MIN_ROWS: usize = 12;

/// The work of one thread: some tokens and some query heads of one key head.
pub struct Tile<'a> {
    pub shape: &'a Shape,
    pub inputs: &'a Inputs<'a>,
    pub kv_head: usize,
    /// Query heads that use `kv_head`.
    pub heads: Range<usize>,
    pub tokens: Range<usize>,
    pub out: &'a Disjoint<'a, f32>,
}

/// Buffers of a tile; row `i` is token `i / heads`, head `i % heads`.
#[derive(Default)]
struct Scratch {
    /// Queries, scaled `(row, head_dim)`.
    q: Vec<f32>,
    /// Keys `(BLOCK, head_dim)` or values `(BLOCK, value_dim)` of a block in f32, if the cache has another type.
    decoded: Vec<f32>,
    /// Transposed keys of a block `(head_dim, BLOCK)`.
    keys: Vec<f32>,
    /// Scores, then weights `(row, BLOCK)`.
    scores: Vec<f32>,
    /// Weighted sums of values `(row, value_dim)`.
    sums: Vec<f32>,
    /// Largest score so far `(row)`.
    max: Vec<f32>,
    /// Sum of the weights so far `(row)`.
    total: Vec<f32>,
}

impl Kernel for Tile<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        thread_local! {
            static SCRATCH: RefCell<Scratch> = RefCell::default();
        }
        // Not `with_borrow_mut`: a closure would be compiled without the instructions of `S`.
        let mut scratch = SCRATCH.take();
        self.start(&mut scratch);
        let positions = &self.inputs.positions[self.tokens.clone()];
        let visible = |&p: &u32| self.shape.visible(p as usize);
        let first = positions.iter().map(visible).map(|r| r.start).min();
        let end = positions.iter().map(visible).map(|r| r.end).max();
        let (first, end) = (first.unwrap_or(0), end.unwrap_or(0));
        for start in (first..end).step_by(BLOCK) {
            let block = start..end.min(start + BLOCK);
            // SAFETY: by the contract of `run`.
            unsafe {
                self.score::<S>(block.clone(), &mut scratch);
                self.weigh::<S>(block.clone(), &mut scratch);
                self.add_values::<S>(block, &mut scratch);
            }
        }
        self.finish(&scratch);
        SCRATCH.set(scratch);
    }
}

impl Tile<'_> {
    /// Keys or values of `kv_head` in a block of positions as f32, and the distance between two positions. A head has `d` elements,
    /// and two positions of `rows` are `stride` elements apart.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn cached<'c, S: Simd>(
        &'c self,
        rows: Rows<'c>,
        [d, stride]: [usize; 2],
        block: &Range<usize>,
        decoded: &'c mut Vec<f32>,
    ) -> (&'c [f32], usize) {
        let first = block.start * stride + self.kv_head * d;
        // SAFETY: by the contract of this function.
        unsafe { rows.decode::<S>(first, stride, [block.len(), d], decoded) }
    }

    /// Initializes the buffers.
    fn start(&self, s: &mut Scratch) {
        let (d, heads) = (self.shape.head_dim, self.heads.len());
        let rows = self.tokens.len() * heads;
        s.q.clear();
        for t in self.tokens.clone() {
            let at = (t * self.shape.n_head + self.heads.start) * d;
            let q = &self.inputs.q[at..at + heads * d];
            s.q.extend(q.iter().map(|x| x * self.shape.scale));
        }
        s.keys.resize(d * BLOCK, 0.0);
        s.scores.resize(rows * BLOCK, 0.0);
        s.sums.clear();
        s.sums.resize(rows * self.shape.value_dim, 0.0);
        s.max.clear();
        s.total.clear();
        for _ in self.tokens.clone() {
            for head in self.heads.clone() {
                // A sink has a score and no value: it initializes maximum and total.
                let sink = self.inputs.sinks.map(|sinks| sinks[head]);
                s.max.push(sink.unwrap_or(f32::NEG_INFINITY));
                s.total.push(if sink.is_some() { 1.0 } else { 0.0 });
            }
        }
    }

    /// Computes the scores of a block of positions.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn score<S: Simd>(&self, block: Range<usize>, s: &mut Scratch) {
        let d = self.shape.head_dim;
        let rows = s.max.len();
        let size = [d, self.inputs.strides[0]];
        let decoded = &mut s.decoded;
        // SAFETY: by the contract of this function.
        let (keys, stride) = unsafe { self.cached::<S>(self.inputs.k, size, &block, decoded) };
        let row_of = |i: usize| &keys[i * stride..][..d];
        if rows < MIN_ROWS {
            for i in 0..block.len() {
                for (q, scores) in s.q.chunks_exact(d).zip(s.scores.chunks_exact_mut(BLOCK)) {
                    // SAFETY: both rows have `d` values; the instructions by the contract of this function.
                    scores[i] = unsafe { dot::<S>(q, row_of(i)) };
                }
            }
            return;
        }
        for i in 0..block.len() {
            for (column, x) in s.keys.chunks_exact_mut(BLOCK).zip(row_of(i)) {
                column[i] = *x;
            }
        }
        s.scores.fill(0.0);
        let product = Product {
            a: &s.q,
            depth: d,
            stride_a: d,
            b: &s.keys,
            stride_b: BLOCK,
            columns: BLOCK,
        };
        // SAFETY: by the contract of this function.
        unsafe { product.add_to::<S>(&mut s.scores) }
    }

    /// Replaces the scores of a block by softmax weights, 0 for masked positions, and rescales the sums so far.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn weigh<S: Simd>(&self, block: Range<usize>, s: &mut Scratch) {
        let (d, heads) = (self.shape.value_dim, self.heads.len());
        for (row, scores) in s.scores.chunks_exact_mut(BLOCK).enumerate() {
            let position = self.inputs.positions[self.tokens.start + row / heads];
            let visible = self.shape.visible(position as usize);
            let first = visible.start.clamp(block.start, block.end) - block.start;
            let end = visible.end.clamp(block.start, block.end) - block.start;
            if first >= end {
                scores.fill(0.0);
                continue;
            }
            if let Some(bound) = self.shape.softcap {
                let cap = |x: &mut f32| *x = bound * (*x / bound).tanh();
                scores[first..end].iter_mut().for_each(cap);
            }
            scores[..first].fill(f32::NEG_INFINITY);
            scores[end..].fill(f32::NEG_INFINITY);
            // SAFETY: `scores` has `BLOCK` values, a multiple of `LANES`; the instructions by the contract of this function.
            unsafe {
                let max = largest(scores).max(s.max[row]);
                let shrink = (s.max[row] - max).exp();
                s.max[row] = max;
                let mut total = S::splat(0.0);
                for at in (0..BLOCK).step_by(S::LANES) {
                    let at = scores.as_mut_ptr().add(at);
                    let weights = exp::<S>(S::add(S::load(at), S::splat(-max)));
                    S::store(at, weights);
                }
                scores[..first].fill(0.0);
                scores[end..].fill(0.0);
                for at in (0..BLOCK).step_by(S::LANES) {
                    total = S::add(total, S::load(scores.as_ptr().add(at)));
                }
                s.total[row] = s.total[row] * shrink + S::sum(total);
                if shrink != 1.0 {
                    s.sums[row * d..][..d].iter_mut().for_each(|x| *x *= shrink);
                }
            }
        }
    }

    /// Adds the weighted values of a block to the sums.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn add_values<S: Simd>(&self, block: Range<usize>, s: &mut Scratch) {
        let size = [self.shape.value_dim, self.inputs.strides[1]];
        let decoded = &mut s.decoded;
        // SAFETY: by the contract of this function.
        let (values, stride) = unsafe { self.cached::<S>(self.inputs.v, size, &block, decoded) };
        let product = Product {
            a: &s.scores,
            depth: block.len(),
            stride_a: BLOCK,
            b: values,
            stride_b: stride,
            columns: self.shape.value_dim,
        };
        // SAFETY: by the contract of this function.
        unsafe { product.add_to::<S>(&mut s.sums) }
    }

    /// Divides the sums by the totals and writes the output.
    fn finish(&self, s: &Scratch) {
        let (d, heads) = (self.shape.value_dim, self.heads.len());
        let rows = s.sums.chunks_exact(d).zip(&s.total).enumerate();
        for (row, (sums, total)) in rows {
            let (t, head) = (row / heads, row % heads);
            let at = ((self.tokens.start + t) * self.shape.n_head + self.heads.start + head) * d;
            // SAFETY: each (token, head) belongs to one tile, and a tile runs on one thread.
            let out = unsafe { self.out.slice(at..at + d) };
            let inverse = 1.0 / total;
            out.iter_mut().zip(sums).for_each(|(o, x)| *o = x * inverse);
        }
    }
}

/// The maximum of the values, whose number is a multiple of 16. It is unspecified if a value is NaN: the weights of the row are
/// NaN then for any maximum.
fn largest(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in values.chunks_exact(16) {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = if *lane > *x { *lane } else { *x };
        }
    }
    lanes
        .iter()
        .fold(f32::NEG_INFINITY, |a, &b| if a > b { a } else { b })
}

/// The inner product.
///
/// # Safety
/// The CPU has the instructions of `S`, and the slices have the same length.
#[inline(always)]
unsafe fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let vectors = a.len() / S::LANES;
    // SAFETY: both slices have at least `vectors * LANES` values; the instructions by the contract of this function.
    let sum = unsafe {
        let mut sum = [S::splat(0.0); 2];
        for i in 0..vectors {
            let at = i * S::LANES;
            let (x, y) = (S::load(a.as_ptr().add(at)), S::load(b.as_ptr().add(at)));
            sum[i % 2] = S::mul_add(x, y, sum[i % 2]);
        }
        S::sum(S::add(sum[0], sum[1]))
    };
    let rest = a.iter().zip(b).skip(vectors * S::LANES);
    sum + rest.map(|(x, y)| x * y).sum::<f32>()
}

/// A product of small f32 matrices.
struct Product<'a> {
    /// `(row, depth)`
    a: &'a [f32],
    depth: usize,
    stride_a: usize,
    /// `(depth, columns)`
    b: &'a [f32],
    stride_b: usize,
    columns: usize,
}

impl Product<'_> {
    /// `c += a · b` for all rows of `c (row, columns)`.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn add_to<S: Simd>(&self, c: &mut [f32]) {
        let rows = c.len() / self.columns;
        assert!(self.depth <= self.stride_a && rows * self.stride_a <= self.a.len());
        assert!((self.depth - 1) * self.stride_b + self.columns <= self.b.len());
        let mut row = 0;
        while row < rows {
            // SAFETY: the rows exist in `a` and `c`, by the assertions and the length of `c`.
            unsafe {
                match rows - row {
                    1 => self.rows::<S, 1>(row, c),
                    2 => self.rows::<S, 2>(row, c),
                    3 => self.rows::<S, 3>(row, c),
                    4 => self.rows::<S, 4>(row, c),
                    5 => self.rows::<S, 5>(row, c),
                    _ => self.rows::<S, STEP_ROWS>(row, c),
                }
            }
            row += STEP_ROWS;
        }
    }

    /// Adds `R` rows from `row` on.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and the rows exist in `a` and `c`.
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize>(&self, row: usize, c: &mut [f32]) {
        let mut column = 0;
        // SAFETY: by the contract of this function; each step ends at or before `columns`.
        unsafe {
            while column + STEP_VECTORS * S::LANES <= self.columns {
                self.step::<S, R, STEP_VECTORS>(row, column, c);
                column += STEP_VECTORS * S::LANES;
            }
            if column + S::LANES <= self.columns {
                self.step::<S, R, 1>(row, column, c);
                column += S::LANES;
            }
        }
        for r in row..row + R {
            for column in column..self.columns {
                let a = &self.a[r * self.stride_a..][..self.depth];
                let b = self.b[column..].iter().step_by(self.stride_b);
                c[r * self.columns + column] += a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
            }
        }
    }

    /// Adds a tile of `R` rows by `V` vectors.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; the rows exist in `a` and `c`, and the columns in `b` and `c`.
    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const V: usize>(
        &self,
        row: usize,
        column: usize,
        c: &mut [f32],
    ) {
        // SAFETY: all offsets are within the rows and columns of the contract of this function.
        unsafe {
            let c = c.as_mut_ptr().add(row * self.columns + column);
            let a = self.a.as_ptr().add(row * self.stride_a);
            let b = self.b.as_ptr().add(column);
            let mut acc = [[S::splat(0.0); V]; R];
            for (r, acc) in acc.iter_mut().enumerate() {
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = S::load(c.add(r * self.columns + v * S::LANES));
                }
            }
            for i in 0..self.depth {
                let mut values = [S::splat(0.0); V];
                for (v, values) in values.iter_mut().enumerate() {
                    *values = S::load(b.add(i * self.stride_b + v * S::LANES));
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let x = S::splat(*a.add(r * self.stride_a + i));
                    for (acc, values) in acc.iter_mut().zip(values) {
                        *acc = S::mul_add(x, values, *acc);
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                for (v, acc) in acc.iter().enumerate() {
                    S::store(c.add(r * self.columns + v * S::LANES), *acc);
                }
            }
        }
    }
}
