//! Causal attention over the key-value cache in f32, in one pass over the keys with an online softmax.

mod tile;

use std::ops::Range;

use crate::cpu::disjoint::Disjoint;
use crate::cpu::quant::Isa;
use crate::cpu::simd;
use crate::cpu::threads::Threads;
use tile::Tile;

/// Parameters of the attention of a layer.
pub struct Shape {
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads; `n_head` is a multiple of it.
    pub n_head_kv: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions that a token attends to, including its own; `None` means all up to its own.
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

/// Inputs of the attention.
pub struct Inputs<'a> {
    /// Queries `(token, n_head, head_dim)`.
    pub q: &'a [f32],
    /// Keys `(position, n_head_kv, head_dim)`.
    pub k: &'a [f32],
    /// Values `(position, n_head_kv, head_dim)`.
    pub v: &'a [f32],
    /// Position of each query in the cache `(token)`.
    pub positions: &'a [u32],
    /// Attention sinks (gpt-oss): additional scores in the softmax without a value `(n_head)`.
    pub sinks: Option<&'a [f32]>,
}

/// Maximum query rows of a tile: tokens times the heads that share keys and values.
const ROWS: usize = 128;
/// Maximum tokens of a tile. The limit bounds the masked scores that are computed for the early tokens of a tile.
const TOKENS: usize = 64;

/// `out[t] = softmax(scale · q[t] · kᵀ) · v` for each head; `out (token, n_head, head_dim)`.
pub fn attention(threads: &Threads, shape: &Shape, inputs: &Inputs, out: &mut [f32]) {
    attention_with(Isa::best(), threads, shape, inputs, out);
}

fn attention_with(isa: Isa, threads: &Threads, shape: &Shape, inputs: &Inputs, out: &mut [f32]) {
    let n_tokens = inputs.positions.len();
    let per_kv = shape.n_head / shape.n_head_kv;
    // With few tokens there are few tiles, so the query heads of a key head are divided between tiles, too.
    let tokens = (ROWS / per_kv).clamp(1, TOKENS).min(n_tokens.max(1));
    let blocks = n_tokens.div_ceil(tokens);
    let wanted = (2 * threads.n()).div_ceil((blocks * shape.n_head_kv).max(1));
    let heads = per_kv.div_ceil(wanted.min(per_kv));
    let parts = per_kv.div_ceil(heads);

    let seen = |&p: &u32| shape.visible(p as usize).len();
    let seen: usize = inputs.positions.iter().map(seen).sum();
    let bytes = seen * shape.n_head * shape.head_dim * size_of::<f32>();
    let out = Disjoint::new(out);
    threads.split(blocks * shape.n_head_kv * parts, bytes, |items| {
        for item in items {
            let (block, part) = (
                item / (shape.n_head_kv * parts),
                item % (shape.n_head_kv * parts),
            );
            let (kv_head, part) = (part / parts, part % parts);
            let first = kv_head * per_kv + part * heads;
            let tile = Tile {
                shape,
                inputs,
                kv_head,
                heads: first..(kv_head * per_kv + per_kv).min(first + heads),
                tokens: block * tokens..n_tokens.min((block + 1) * tokens),
                out: &out,
            };
            simd::dispatch_with(isa, tile);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition of attention, in f64.
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
    fn agrees_with_the_definition_in_f64() {
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
        let sinks: Vec<f32> = (0..8).map(|i| [0.5, -1.0, 3.0, 0.0][i % 4]).collect();
        // n_head, n_head_kv, head_dim, window, sinks, tokens, earlier positions
        let cases = [
            (4, 2, 20, None, false, 20, 150),
            (4, 2, 20, Some(128), true, 20, 150),
            (4, 4, 64, Some(3), false, 70, 0),
            (8, 1, 33, None, true, 1, 130),
            (8, 2, 128, None, false, 130, 7),
            (4, 1, 8, Some(64), false, 1, 200),
        ];
        for (n_head, n_head_kv, head_dim, window, with_sinks, n, past) in cases {
            let shape = Shape {
                n_head,
                n_head_kv,
                head_dim,
                window,
                scale: 0.7,
            };
            let sinks = with_sinks.then(|| &sinks[..n_head]);
            let positions: Vec<u32> = (past..past + n).collect();
            let cached = (past + n) as usize * n_head_kv * head_dim;
            let q = noise(n as usize * n_head * head_dim, 1);
            let (k, v) = (noise(cached, 2), noise(cached, 3));
            let expected = reference(&shape, &q, &k, &v, &positions, sinks);
            let inputs = Inputs {
                q: &q,
                k: &k,
                v: &v,
                positions: &positions,
                sinks,
            };
            for isa in Isa::available() {
                let mut out = vec![f32::NAN; q.len()];
                attention_with(isa, &threads, &shape, &inputs, &mut out);
                for (i, (got, want)) in out.iter().zip(&expected).enumerate() {
                    assert!(
                        (*got as f64 - want).abs() < 2e-5,
                        "{got} {want} at {i}, {isa:?}, {n_head} heads of {head_dim}, window {window:?}"
                    );
                }
            }
        }
    }
}
