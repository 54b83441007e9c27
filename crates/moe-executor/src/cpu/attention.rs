//! Causal attention over the key-value cache, one pass with a running softmax.
//!
//! The running softmax is that of "FlashAttention" (Dao et al., 2022), algorithm 1: scores of a block of positions,
//! then the sum so far rescaled to the new maximum. No memory beyond the block is needed.

use std::ops::Range;

use crate::cpu::disjoint::Disjoint;
use crate::cpu::threads::Threads;

/// Positions handled between two rescalings.
const BLOCK: usize = 64;

/// What every head of a layer shares.
pub struct Shape {
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads; `n_head` is a multiple.
    pub n_head_kv: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions that a token sees, itself included; `None` = all before it.
    pub window: Option<usize>,
    /// Factor on the scores.
    pub scale: f32,
}

impl Shape {
    /// Cache positions that the token at `position` attends to.
    pub fn visible(&self, position: usize) -> Range<usize> {
        let start = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
        start..position + 1
    }
}

/// What attention reads.
pub struct Inputs<'a> {
    /// Queries `(t, n_head, head_dim)`.
    pub q: &'a [f32],
    /// Keys `(position, n_head_kv, head_dim)`.
    pub k: &'a [f32],
    /// Values `(position, n_head_kv, head_dim)`.
    pub v: &'a [f32],
    /// Place of each query in the cache `(t)`.
    pub positions: &'a [u32],
    /// Extra scores that take part in the softmax and carry no value `(n_head)` (gpt-oss).
    pub sinks: Option<&'a [f32]>,
}

/// `out[t] = softmax(scale · q[t] · kᵀ) · v` for each head; `out (t, n_head, head_dim)`.
pub fn attention(threads: &Threads, shape: &Shape, inputs: &Inputs, out: &mut [f32]) {
    let Inputs {
        q,
        k,
        v,
        positions,
        sinks,
    } = *inputs;
    let (n_head, d) = (shape.n_head, shape.head_dim);
    let kv_width = shape.n_head_kv * d;
    let per_kv = n_head / shape.n_head_kv;
    let seen: usize = positions
        .iter()
        .map(|&p| shape.visible(p as usize).len())
        .sum();
    let out = Disjoint::new(out);
    threads.split(positions.len() * n_head, seen * kv_width * 8, |items| {
        for item in items {
            let (t, head) = (item / n_head, item % n_head);
            let at = item * d;
            // SAFETY: every item has its own part of the output.
            let out = unsafe { out.slice(at..at + d) };
            let column = head / per_kv * d;
            let rows = Rows {
                k,
                v,
                width: kv_width,
                column,
            };
            let sink = sinks.map(|s| s[head]);
            one_head(
                &q[at..at + d],
                &rows,
                shape.visible(positions[t] as usize),
                shape.scale,
                sink,
                out,
            );
        }
    });
}

/// The cache as one key-value head sees it.
struct Rows<'a> {
    k: &'a [f32],
    v: &'a [f32],
    width: usize,
    column: usize,
}

fn one_head(
    q: &[f32],
    rows: &Rows,
    visible: Range<usize>,
    scale: f32,
    sink: Option<f32>,
    out: &mut [f32],
) {
    let d = q.len();
    out.fill(0.0);
    let (mut max, mut sum) = match sink {
        Some(sink) => (sink, 1.0),
        None => (f32::NEG_INFINITY, 0.0),
    };
    let mut scores = [0.0f32; BLOCK];
    let mut start = visible.start;
    while start < visible.end {
        let n = BLOCK.min(visible.end - start);
        let mut block_max = max;
        for (i, score) in scores[..n].iter_mut().enumerate() {
            let at = (start + i) * rows.width + rows.column;
            *score = dot(q, &rows.k[at..at + d]) * scale;
            block_max = block_max.max(*score);
        }
        if block_max > max {
            let shrink = (max - block_max).exp();
            sum *= shrink;
            out.iter_mut().for_each(|o| *o *= shrink);
            max = block_max;
        }
        for (i, score) in scores[..n].iter().enumerate() {
            let weight = (score - max).exp();
            sum += weight;
            let at = (start + i) * rows.width + rows.column;
            for (o, v) in out.iter_mut().zip(&rows.v[at..at + d]) {
                *o += weight * v;
            }
        }
        start += n;
    }
    let inverse = 1.0 / sum;
    out.iter_mut().for_each(|o| *o *= inverse);
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 8;
    let mut lanes = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_chunks
        .remainder()
        .iter()
        .zip(b_chunks.remainder())
        .map(|(x, y)| x * y)
        .sum();
    for (x, y) in a_chunks.zip(b_chunks) {
        for i in 0..LANES {
            lanes[i] += x[i] * y[i];
        }
    }
    lanes.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, in f64.
    fn reference(
        shape: &Shape,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        positions: &[u32],
        sinks: Option<&[f32]>,
    ) -> Vec<f64> {
        let (d, width) = (shape.head_dim, shape.n_head_kv * shape.head_dim);
        let mut out = Vec::new();
        for (t, &position) in positions.iter().enumerate() {
            for head in 0..shape.n_head {
                let column = head * shape.n_head_kv / shape.n_head * d;
                let q = &q[(t * shape.n_head + head) * d..][..d];
                let first = shape
                    .window
                    .map_or(0, |w| (position as usize + 1).saturating_sub(w));
                let score = |p: usize| -> f64 {
                    let k = &k[p * width + column..][..d];
                    q.iter()
                        .zip(k)
                        .map(|(a, b)| *a as f64 * *b as f64)
                        .sum::<f64>()
                        * shape.scale as f64
                };
                let weights: Vec<f64> = (first..=position as usize)
                    .map(|p| score(p).exp())
                    .collect();
                let sum =
                    weights.iter().sum::<f64>() + sinks.map_or(0.0, |s| (s[head] as f64).exp());
                for i in 0..d {
                    let value = weights.iter().enumerate();
                    out.push(
                        value
                            .map(|(p, w)| w * v[(first + p) * width + column + i] as f64)
                            .sum::<f64>()
                            / sum,
                    );
                }
            }
        }
        out
    }

    #[test]
    fn agrees_with_the_definition() {
        let noise = |n: usize, seed: u32| -> Vec<f32> {
            let mut state = seed;
            (0..n)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 8) as f32 / (1 << 23) as f32 - 1.0
                })
                .collect()
        };
        let threads = Threads::new(2).unwrap();
        let sinks = [0.5, -1.0, 3.0, 0.0];
        for (window, sinks) in [(None, None), (Some(128), Some(&sinks[..])), (Some(3), None)] {
            let shape = Shape {
                n_head: 4,
                n_head_kv: 2,
                head_dim: 20,
                window,
                scale: 0.7,
            };
            let positions: Vec<u32> = (150..170).collect();
            let (q, k, v) = (
                noise(20 * 4 * 20, 1),
                noise(170 * 40, 2),
                noise(170 * 40, 3),
            );
            let mut out = vec![0.0; q.len()];
            let inputs = Inputs {
                q: &q,
                k: &k,
                v: &v,
                positions: &positions,
                sinks,
            };
            attention(&threads, &shape, &inputs, &mut out);
            let expected = reference(&shape, &q, &k, &v, &positions, sinks);
            for (got, want) in out.iter().zip(&expected) {
                assert!(
                    (*got as f64 - want).abs() < 1e-5,
                    "{got} {want}, window {window:?}"
                );
            }
        }
    }
}
