//! Attention of some tokens, for heads that share their keys and values.
//!
//! The running softmax is that of "FlashAttention" (Dao et al., 2022), algorithm 1: scores of a block of positions, then
//! the sum so far rescaled to the new maximum. No memory beyond the block is needed.

use std::cell::RefCell;
use std::ops::Range;

use super::{Inputs, Shape};
use crate::cpu::disjoint::Disjoint;
use crate::cpu::simd::{Kernel, Simd, exp};

/// Positions handled between two rescalings.
const BLOCK: usize = 64;
/// Rows of queries and vectors of columns in one step of a product: they and their operands fill the registers.
const STEP_ROWS: usize = 6;
const STEP_VECTORS: usize = 2;
/// With fewer rows of queries, bringing the keys into columns costs more than it saves.
const MIN_ROWS: usize = 12;

/// One piece of work.
pub struct Tile<'a> {
    pub shape: &'a Shape,
    pub inputs: &'a Inputs<'a>,
    pub kv_head: usize,
    /// Query heads, all of them of `kv_head`.
    pub heads: Range<usize>,
    pub tokens: Range<usize>,
    pub out: &'a Disjoint<'a, f32>,
}

/// Buffers of a tile; row `i` is token `i / heads`, head `i % heads`.
#[derive(Default)]
struct Scratch {
    /// Queries, scaled `(row, head_dim)`.
    q: Vec<f32>,
    /// Keys of a block in columns `(head_dim, BLOCK)`.
    keys: Vec<f32>,
    /// Scores, then weights `(row, BLOCK)`.
    scores: Vec<f32>,
    /// Weighted sums of values `(row, head_dim)`.
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
        // Taken out and put back: in a closure the code would be compiled without the instructions.
        let mut scratch = SCRATCH.take();
        self.start(&mut scratch);
        let positions = &self.inputs.positions[self.tokens.clone()];
        let visible = |&p: &u32| self.shape.visible(p as usize);
        let first = positions.iter().map(visible).map(|r| r.start).min();
        let end = positions.iter().map(visible).map(|r| r.end).max();
        let (first, end) = (first.unwrap_or(0), end.unwrap_or(0));
        for start in (first..end).step_by(BLOCK) {
            let block = start..end.min(start + BLOCK);
            // SAFETY: by the caller's promise.
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
    fn width(&self) -> usize {
        self.shape.n_head_kv * self.shape.head_dim
    }

    /// The part of a cache that this tile's heads see, from a position on.
    fn cached<'c>(&self, cache: &'c [f32], position: usize) -> &'c [f32] {
        &cache[position * self.width() + self.kv_head * self.shape.head_dim..]
    }

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
        s.sums.resize(rows * d, 0.0);
        s.max.clear();
        s.total.clear();
        for _ in self.tokens.clone() {
            for head in self.heads.clone() {
                // A sink takes part with its score and has no value.
                let sink = self.inputs.sinks.map(|sinks| sinks[head]);
                s.max.push(sink.unwrap_or(f32::NEG_INFINITY));
                s.total.push(if sink.is_some() { 1.0 } else { 0.0 });
            }
        }
    }

    /// Scores of a block of positions.
    #[inline(always)]
    unsafe fn score<S: Simd>(&self, block: Range<usize>, s: &mut Scratch) {
        let (d, width) = (self.shape.head_dim, self.width());
        let rows = s.max.len();
        let keys = self.cached(self.inputs.k, block.start);
        let row_of = |i: usize| &keys[i * width..][..d];
        if rows < MIN_ROWS {
            for i in 0..block.len() {
                for (q, scores) in s.q.chunks_exact(d).zip(s.scores.chunks_exact_mut(BLOCK)) {
                    // SAFETY: both rows have `d` values.
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
        // SAFETY: by the caller's promise.
        unsafe { product.add_to::<S>(&mut s.scores) }
    }

    /// Turns the scores of a block into weights, 0 where a token sees nothing, and rescales what was summed so far.
    #[inline(always)]
    unsafe fn weigh<S: Simd>(&self, block: Range<usize>, s: &mut Scratch) {
        let (d, heads) = (self.shape.head_dim, self.heads.len());
        for (row, scores) in s.scores.chunks_exact_mut(BLOCK).enumerate() {
            let position = self.inputs.positions[self.tokens.start + row / heads];
            let visible = self.shape.visible(position as usize);
            let first = visible.start.clamp(block.start, block.end) - block.start;
            let end = visible.end.clamp(block.start, block.end) - block.start;
            if first >= end {
                scores.fill(0.0);
                continue;
            }
            scores[..first].fill(f32::NEG_INFINITY);
            scores[end..].fill(f32::NEG_INFINITY);
            // SAFETY: by the caller's promise; `BLOCK` is a multiple of all lanes.
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

    /// Adds the values of a block, weighted.
    #[inline(always)]
    unsafe fn add_values<S: Simd>(&self, block: Range<usize>, s: &mut Scratch) {
        let product = Product {
            a: &s.scores,
            depth: block.len(),
            stride_a: BLOCK,
            b: self.cached(self.inputs.v, block.start),
            stride_b: self.width(),
            columns: self.shape.head_dim,
        };
        // SAFETY: by the caller's promise.
        unsafe { product.add_to::<S>(&mut s.sums) }
    }

    fn finish(&self, s: &Scratch) {
        let (d, heads) = (self.shape.head_dim, self.heads.len());
        let rows = s.sums.chunks_exact(d).zip(&s.total).enumerate();
        for (row, (sums, total)) in rows {
            let (t, head) = (row / heads, row % heads);
            let at = ((self.tokens.start + t) * self.shape.n_head + self.heads.start + head) * d;
            // SAFETY: a token's head belongs to one tile.
            let out = unsafe { self.out.slice(at..at + d) };
            let inverse = 1.0 / total;
            out.iter_mut().zip(sums).for_each(|(o, x)| *o = x * inverse);
        }
    }
}

/// The largest of some numbers, or one that is no number.
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

/// # Safety
/// As for [`Simd`]; the rows are of the same length.
#[inline(always)]
unsafe fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let vectors = a.len() / S::LANES;
    // SAFETY: `vectors` whole vectors lie in both.
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

/// A product of small matrices of f32.
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
    /// `c += a · b`, for every row of `c (row, columns)`.
    ///
    /// # Safety
    /// As for [`Simd`].
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

    /// `R` rows from `row` on.
    #[inline(always)]
    unsafe fn rows<S: Simd, const R: usize>(&self, row: usize, c: &mut [f32]) {
        let mut column = 0;
        // SAFETY: by the caller's promise, and columns stay within the rows.
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

    /// `R` rows by `V` vectors.
    #[inline(always)]
    unsafe fn step<S: Simd, const R: usize, const V: usize>(
        &self,
        row: usize,
        column: usize,
        c: &mut [f32],
    ) {
        // SAFETY: by the caller's promise.
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
