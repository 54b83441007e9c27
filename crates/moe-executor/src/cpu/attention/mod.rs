//! Causal attention over the key-value cache, in f32, in one pass over the keys with an online softmax.

mod rows;
#[cfg(test)]
mod tests;
mod tile;

use std::ops::Range;

use crate::cpu::disjoint::Disjoint;
use crate::cpu::quant::Isa;
use crate::cpu::simd;
use crate::cpu::threads::Threads;
pub use rows::Rows;
use tile::Tile;

/// Parameters of the attention of a layer.
pub struct Shape {
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads; `n_head` is a multiple of it.
    pub n_head_kv: usize,
    /// Width of a head of queries and keys.
    pub head_dim: usize,
    /// Width of a head of values.
    pub value_dim: usize,
    /// Positions that a token attends to, including its own; `None` means all up to its own.
    pub window: Option<usize>,
    /// Length of the chunks that the positions are divided into, at least 1: a token attends to positions of its own chunk only.
    pub chunk: Option<usize>,
    /// Factor on the scores.
    pub scale: f32,
    /// Bound of the absolute values of the scores: `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
}

impl Shape {
    /// Cache positions that the token at `position` attends to.
    pub fn visible(&self, position: usize) -> Range<usize> {
        let start = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let chunk = self.chunk.map_or(0, |n| position / n * n);
        start.max(chunk)..position + 1
    }
}

/// Inputs of the attention.
pub struct Inputs<'a> {
    /// Queries `(token, n_head, head_dim)`.
    pub q: &'a [f32],
    /// Keys `(position, n_head_kv, head_dim)`.
    pub k: Rows<'a>,
    /// Values `(position, n_head_kv, value_dim)`.
    pub v: Rows<'a>,
    /// Elements between two positions in `k` and in `v`.
    pub strides: [usize; 2],
    /// Position of each query in the cache `(token)`.
    pub positions: &'a [u32],
    /// Attention sinks (gpt-oss): additional scores in the softmax without a value `(n_head)`.
    pub sinks: Option<&'a [f32]>,
}

/// Maximum query rows of a tile: tokens times the heads that share keys and values.
const ROWS: usize = 128;
/// Maximum tokens of a tile. The limit bounds the masked scores that are computed for the early tokens of a tile.
const TOKENS: usize = 64;

/// `out[t] = softmax(scale · q[t] · kᵀ) · v` for each head; `out (token, n_head, value_dim)`.
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
