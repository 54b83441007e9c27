//! Multi-head latent attention: the keys and values of a token are products of one compressed row.
//!
//! DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1. A head of queries and keys has elements without a position, followed by rotated
//! elements; the rotated elements of the keys are the same in all heads. Files have one of two formats:
//!
//! - Older files contain one matrix that decompresses keys and values (`attn_kv_b`). The cache has the keys and values of all heads.
//! - Newer files contain its parts for each head (`attn_k_b`, `attn_v_b`). The matrix of the keys is applied to the queries instead, and
//!   the matrix of the values to the results of the heads. All heads then attend to the compressed rows, which the cache stores once:
//!   a compressed row with the rotated elements is the key, and the compressed row alone is the value.
//!
//! Without RoPE (Kimi Linear), the elements that others rotate are used as they are. Its files have the newer format.

use std::ops::Range;

use moe_gguf::LayerId;

use super::{AttentionState, Temperature};
use crate::activation::{Activation, NodeName};
use crate::buffers::Inventory;
use crate::cpu::attention::Shape;
use crate::cpu::heads::Part;
use crate::error::Result;
use crate::hparams::{HParams, Rope};
use crate::kv_cache::KvCache;
use crate::norm::Norm;
use crate::ops::{At, Join, Ops};
use crate::weights::{Loader, Matrix};

/// The latent attention of an architecture.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LatentSpec {
    /// Width of the compressed queries; `None` if queries are not compressed.
    pub q_rank: Option<usize>,
    /// Width of the compressed keys and values.
    pub kv_rank: usize,
    /// Width of a head of decompressed keys, including the rotated elements.
    pub key_dim: usize,
    /// Width of a head of decompressed values.
    pub value_dim: usize,
    /// Whether all heads attend to the compressed rows. It must be set for layers without RoPE.
    pub absorbed: bool,
    /// Factors on the queries.
    pub temperature: Option<Temperature>,
}

/// Buffers of latent attention, shared by all layers.
pub(super) struct LatentState {
    /// Compressed queries `(token, q_rank)`.
    compressed_q: Activation,
    /// The same after their norm.
    normed_q: Activation,
    /// Queries of the decompressed keys `(token, n_head * key_dim)`, if heads attend to compressed rows.
    q: Activation,
    /// Compressed keys and values, and rotated elements before RoPE `(token, kv_rank + n_rot)`.
    rows: Activation,
    /// Compressed keys and values `(token, kv_rank)`.
    compressed: Activation,
    /// The same after their norm.
    normed: Activation,
    /// Rotated elements of the keys `(token, n_rot)`, if keys are decompressed.
    rotated: Activation,
    /// Keys without rotated elements, and values `(token, n_head * (key_dim - n_rot + value_dim))`; if heads attend to compressed
    /// rows, the decompressed output of the heads `(token, n_head * value_dim)`.
    decompressed: Activation,
}

impl LatentState {
    /// Buffers whose ids start at `first_id`.
    pub fn new(first_id: u64) -> LatentState {
        let buffer = |i| Activation::new(first_id + i);
        LatentState {
            compressed_q: buffer(0),
            normed_q: buffer(1),
            q: buffer(2),
            rows: buffer(3),
            compressed: buffer(4),
            normed: buffer(5),
            rotated: buffer(6),
            decompressed: buffer(7),
        }
    }

    /// Adds its buffers to an inventory.
    pub fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("compressed queries", &self.compressed_q);
        inventory.activation("normed compressed queries", &self.normed_q);
        inventory.activation("queries of decompressed keys", &self.q);
        inventory.activation("compressed rows with rotated elements", &self.rows);
        inventory.activation("compressed keys and values", &self.compressed);
        inventory.activation("normed compressed keys and values", &self.normed);
        inventory.activation("rotated elements of keys", &self.rotated);
        inventory.activation("decompressed keys and values", &self.decompressed);
    }

    /// The output of heads that attend to compressed rows.
    pub fn output(&mut self) -> &mut Activation {
        &mut self.decompressed
    }
}

/// Weights of the queries, keys and values of a layer.
pub(super) struct Latent<'g> {
    il: LayerId,
    spec: LatentSpec,
    rope: Rope,
    /// Whether RoPE rotates the elements with a position.
    rotates: bool,
    /// Compression of the queries `(n_embd, q_rank)`, and their norm `(q_rank)`.
    compress_q: Option<(Matrix<'g>, Norm)>,
    /// Queries `(q_rank or n_embd, n_head * key_dim)`.
    queries: Matrix<'g>,
    /// Compression of keys and values, and rotated elements of the keys `(n_embd, kv_rank + n_rot)`.
    compress: Matrix<'g>,
    /// Norm of the compressed keys and values `(kv_rank)`.
    norm: Norm,
    decompress: Decompress<'g>,
}

/// Decompression of keys and values.
enum Decompress<'g> {
    /// Keys without rotated elements, and values `(kv_rank, n_head * (key_dim - n_rot + value_dim))`.
    Rows(Box<Matrix<'g>>),
    /// Matrices for each head, applied to the queries `(key_dim - n_rot, kv_rank, n_head)` and to the output of the heads
    /// `(kv_rank, value_dim, n_head)`.
    Heads(Box<[Matrix<'g>; 2]>),
}

impl<'g> Latent<'g> {
    pub fn load(
        loader: &Loader<'g>,
        hp: &HParams,
        il: LayerId,
        spec: &LatentSpec,
        rotates: bool,
    ) -> Result<Latent<'g>> {
        let name = |part: &str| format!("blk.{il}.{part}");
        let stack = |part: &str, n_in, n_out, n_head| {
            loader.stack(&format!("blk.{il}.{part}.weight"), n_in, n_out, n_head)
        };
        let norm = |part: &str, n| Norm::load(loader, hp, &name(part), n, false);
        let (n_embd, n_head) = (hp.n_embd, hp.heads[il.index()].n);
        let (rank, n_rot) = (spec.kv_rank, hp.rope.n_dims);
        let (n_plain, value_dim) = (spec.key_dim - n_rot, spec.value_dim);
        let compress_q = spec.q_rank.map(|q_rank| {
            let compress = stack("attn_q_a", n_embd, q_rank, 1)?;
            Ok::<_, crate::Error>((compress, norm("attn_q_a_norm", q_rank)?))
        });
        let (queries, n_in) = match spec.q_rank {
            Some(q_rank) => ("attn_q_b", q_rank),
            None => ("attn_q", n_embd),
        };
        let decompress = if spec.absorbed {
            let keys = stack("attn_k_b", n_plain, rank, n_head)?;
            let values = stack("attn_v_b", rank, value_dim, n_head)?;
            Decompress::Heads(Box::new([keys, values]))
        } else {
            let n = n_head * (n_plain + value_dim);
            Decompress::Rows(Box::new(stack("attn_kv_b", rank, n, 1)?))
        };
        Ok(Latent {
            il,
            spec: *spec,
            rope: hp.rope,
            rotates,
            compress_q: compress_q.transpose()?,
            queries: stack(queries, n_in, n_head * spec.key_dim, 1)?,
            compress: stack("attn_kv_a_mqa", n_embd, rank + n_rot, 1)?,
            norm: norm("attn_kv_a_norm", rank)?,
            decompress,
        })
    }

    /// Whether all heads attend to the compressed rows.
    pub fn is_absorbed(&self) -> bool {
        self.spec.absorbed
    }

    /// Operations of the layer except RoPE, the stores to the cache and the heads. Each writes one record per pass.
    pub fn ops(&self) -> usize {
        let compress_q = self.compress_q.as_ref();
        let queries = 1 + compress_q.map_or(0, |(_, norm)| 1 + norm.ops());
        let temperature = usize::from(self.spec.temperature.is_some());
        let decompress = match self.decompress {
            Decompress::Rows(_) => 4,
            Decompress::Heads(_) => 5,
        };
        queries + temperature + 1 + self.norm.ops() + decompress
    }

    /// Computes queries, keys and values of the normed input. Stores keys and values in the cache.
    pub fn inputs(&self, ops: &mut Ops, at: At, s: &mut AttentionState, cache: &mut KvCache) {
        self.project(ops, at, s);
        match &self.decompress {
            Decompress::Rows(matrix) => {
                let name = self.name("Qcur");
                ops.rope_ends(name, &self.rope, self.spec.key_dim, &mut s.q);
                self.scale_queries(ops, &mut s.q);
                self.compress(ops, at, s);
                self.decompressed_rows(ops, matrix, s);
                ops.store_kv(at, &mut s.k, Some(&mut s.v), false, cache);
            }
            Decompress::Heads(matrices) => {
                self.absorbed_queries(ops, &matrices[0], s);
                self.scale_queries(ops, &mut s.q);
                self.compress(ops, at, s);
                self.compressed_keys(ops, s);
                ops.store_kv(at, &mut s.k, None, false, cache);
            }
        }
    }

    /// Computes the heads after [`Latent::inputs`]. The output is in `s.heads`, or in [`LatentState::output`] if heads attend to
    /// compressed rows.
    pub fn attend(
        &self,
        ops: &mut Ops,
        at: At,
        shape: &Shape,
        s: &mut AttentionState,
        cache: &mut KvCache,
    ) {
        let cache = (cache, self.il);
        ops.attention(at, shape, None, &mut s.q, cache, &mut s.heads);
        if let Decompress::Heads(matrices) = &self.decompress {
            let name = self.name("fattn_mla");
            let out = &mut s.latent.decompressed;
            ops.head_products(name, &matrices[1], &mut s.heads, out);
        }
    }

    fn name(&self, stem: &'static str) -> NodeName {
        NodeName::of(stem, self.il)
    }

    /// Width of a compressed row with the rotated elements.
    fn row_width(&self) -> usize {
        self.spec.kv_rank + self.rope.n_dims
    }

    /// The queries of decompressed keys, in `s.q`, or in `s.latent.q` if heads attend to compressed rows.
    fn project(&self, ops: &mut Ops, at: At, s: &mut AttentionState) {
        let name = self.name("q");
        let latent = &mut s.latent;
        let q = if self.spec.absorbed {
            &mut latent.q
        } else {
            &mut s.q
        };
        let Some((compress, norm)) = &self.compress_q else {
            return ops.mul_mat(name, &self.queries, &mut s.normed, q);
        };
        ops.mul_mat(name, compress, &mut s.normed, &mut latent.compressed_q);
        let names = [self.name("norm"), name];
        let (compressed, normed) = (&mut latent.compressed_q, &mut latent.normed_q);
        ops.norm(at.device, names, compressed, norm, normed);
        ops.mul_mat(name, &self.queries, normed, q);
    }

    /// The queries of compressed rows in `s.q`: `keys` times the elements without a position, then the rotated elements.
    fn absorbed_queries(&self, ops: &mut Ops, keys: &Matrix, s: &mut AttentionState) {
        if !self.rotates {
            let names = ["q_nope_absorbed", "Qcur"].map(|stem| self.name(stem));
            let (n_end, from, to) = (self.rope.n_dims, &mut s.latent.q, &mut s.q);
            return ops.absorbed_plain_queries(names, keys, n_end, from, to);
        }
        let names = ["q_nope_absorbed", "q_pe", "Qcur"].map(|stem| self.name(stem));
        let src = (&mut s.latent.q, self.spec.key_dim);
        ops.absorbed_queries(names, keys, &self.rope, src, &mut s.q);
    }

    fn scale_queries(&self, ops: &mut Ops, q: &mut Activation) {
        if let Some(temperature) = self.spec.temperature {
            let name = self.name("Qcur_attn_temp_scaled");
            let factor = |position| temperature.factor(position);
            ops.scale_rows(name, "inp_attn_scale", factor, q);
        }
    }

    /// The compressed keys and values: with rotated elements in `s.latent.rows`, and after their norm in `s.latent.normed`.
    fn compress(&self, ops: &mut Ops, at: At, s: &mut AttentionState) {
        let latent = &mut s.latent;
        let name = self.name("kv_cmpr_pe");
        ops.mul_mat(name, &self.compress, &mut s.normed, &mut latent.rows);
        let (rows, compressed) = (&mut latent.rows, &mut latent.compressed);
        // llama.cpp names the view of the compressed elements only with RoPE.
        let view = if self.rotates { name } else { name.view() };
        ops.columns(view, 0..self.spec.kv_rank, rows, compressed);
        let names = ["norm", "kv_cmpr"].map(|stem| self.name(stem));
        ops.norm(at.device, names, compressed, &self.norm, &mut latent.normed);
    }

    /// The keys of compressed rows in `s.k`.
    fn compressed_keys(&self, ops: &mut Ops, s: &mut AttentionState) {
        if !self.rotates {
            let from = [&mut s.latent.normed, &mut s.latent.rows];
            return ops.plain_keys(self.name("Kcur"), self.rope.n_dims, from, &mut s.k);
        }
        let (latent, rank) = (&mut s.latent, self.spec.kv_rank);
        let join = Join {
            starts: (&mut latent.normed, part(0..rank, rank)),
            ends: (&mut latent.rows, part(rank..self.row_width(), 0)),
            n_head: 1,
        };
        let names = ["k_pe", "Kcur"].map(|stem| self.name(stem));
        ops.join_heads(names, Some(&self.rope), join, &mut s.k);
    }

    /// The keys and values of all heads in `s.k` and `s.v`.
    fn decompressed_rows(&self, ops: &mut Ops, matrix: &Matrix, s: &mut AttentionState) {
        let LatentSpec {
            key_dim, value_dim, ..
        } = self.spec;
        let n_rot = self.rope.n_dims;
        let n_plain = key_dim - n_rot;
        let width = n_plain + value_dim;
        let n_head = matrix.n_out / width;
        let latent = &mut s.latent;
        let (normed, kv) = (&mut latent.normed, &mut latent.decompressed);
        ops.mul_mat(self.name("kv"), matrix, normed, kv);
        let values = (&mut *kv, part(n_plain..width, width));
        ops.copy_of_heads(self.name("Vcur_cont"), values, n_head, &mut s.v);
        let (rows, rotated) = (&mut latent.rows, &mut latent.rotated);
        ops.rope_end_of_rows(self.name("k_pe"), &self.rope, rows, rotated);
        let join = Join {
            starts: (kv, part(0..n_plain, width)),
            ends: (rotated, part(0..n_rot, 0)),
            n_head,
        };
        let names = ["k_pe_repeated", "Kcur"].map(|stem| self.name(stem));
        ops.join_heads(names, None, join, &mut s.k);
    }
}

/// The elements `of` of heads at a distance of `stride` elements.
fn part(of: Range<usize>, stride: usize) -> Part {
    Part {
        first: of.start,
        n: of.len(),
        stride,
    }
}
