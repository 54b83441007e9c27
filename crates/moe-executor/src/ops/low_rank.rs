//! Products of LoRA adapters, which are added to the product of a matrix.
//!
//! `dst += scale · (b · (a · src))`, with the operations of `build_lora_mm` and `build_lora_mm_id` in llama.cpp's `llama-graph.cpp`:
//! two products, the multiplication by the scale, and the addition. llama.cpp does not define the order of several adapters; here it is
//! the order in which they were given.

use crate::activation::{Activation, AdapterStep, NodeName};
use crate::buffers::Inventory;
use crate::cpu::matmul::{self, Entries, RowOf};
use crate::ops::experts::Projection;
use crate::ops::{Ops, Scope, number, router};
use crate::recorder::{Lanes, Routing, Source};
use crate::weights::{LowRank, Matrix};

/// Buffer id of the products with `a`.
const INNER_BUFFER: u64 = (1 << 16) - 8;
/// Buffer id of the products with `b`.
const OUTER_BUFFER: u64 = (1 << 16) - 9;

/// Buffers of products with adapters, shared by all layers.
pub(super) struct LowRankBuffers {
    /// Products with `a` `(row, rank)`.
    inner: Activation,
    /// Products with `b` `(row, n_out)`.
    outer: Activation,
}

impl LowRankBuffers {
    /// Empty buffers.
    pub fn new() -> LowRankBuffers {
        LowRankBuffers {
            inner: Activation::new(INNER_BUFFER),
            outer: Activation::new(OUTER_BUFFER),
        }
    }

    /// Adds the buffers to an inventory.
    pub fn buffers(&self, inventory: &mut Inventory) {
        inventory.activation("adapter products of rank", &self.inner);
        inventory.activation("adapter products", &self.outer);
    }
}

/// The name of the sum after adapter `i` of `n`.
fn sum_name(result: NodeName, i: usize, n: usize) -> NodeName {
    if i + 1 == n {
        result
    } else {
        result.adapter_step(AdapterStep::Sum)
    }
}

impl Ops<'_> {
    /// Adds the products of the adapters of `weights` to `dst (row, n_out)`; `src (row, n_in)` is on the CPU. `result` is the name of
    /// the sum.
    pub(super) fn add_low_rank(
        &mut self,
        scope: &mut Scope,
        result: NodeName,
        weights: &Matrix,
        src: &Activation,
        dst: &mut Activation,
    ) {
        let n = weights.low_rank.len();
        for (i, pair) in weights.low_rank.iter().enumerate() {
            let name = result.adapter_step(AdapterStep::A);
            self.low_rank.inner.shape(name, pair.a.n_out, src.rows);
            matmul::mul_mat(
                self.threads,
                &pair.a,
                src.data(),
                self.low_rank.inner.data_mut(),
                &mut self.quantized,
            );
            let sources = [Source::from(&pair.a), Source::from(src)];
            self.record(scope, number::MUL_MAT, name, &sources);

            let name = result.adapter_step(AdapterStep::B);
            self.low_rank.outer.shape(name, pair.b.n_out, src.rows);
            matmul::mul_mat(
                self.threads,
                &pair.b,
                self.low_rank.inner.data(),
                self.low_rank.outer.data_mut(),
                &mut self.quantized,
            );
            let inner = Source::from(&self.low_rank.inner);
            let sources = [Source::from(&pair.b), inner];
            self.record(scope, number::MUL_MAT, name, &sources);

            self.scale_and_add(scope, pair.scale, (result, sum_name(result, i, n)), dst);
        }
    }

    /// Like [`Ops::add_low_rank`] for the matrices of the selected experts; `src (token, n_in)` or `(token, slot, n_in)`,
    /// `dst (token, slot, n_out)`. The worklist contains all selected experts.
    pub(super) fn add_low_rank_of_experts(
        &mut self,
        scope: &mut Scope,
        result: NodeName,
        projection: &Projection,
        src: &Activation,
        (routing, lanes): (&Routing, Lanes),
        dst: &mut Activation,
    ) {
        let pairs = &projection.linear.weights.low_rank;
        let entries = routing.ids.len();
        let rows_per = entries / src.rows.max(1);
        let suffix = if rows_per > 1 { " (reshaped)" } else { "" };
        for (i, pair) in pairs.iter().enumerate() {
            let name = result.adapter_step(AdapterStep::A);
            self.multiply_inner(pair, name, src, entries);
            let ids = router::ids(projection.il, routing);
            let sources = [Source::from(&pair.a), Source::view(src, suffix), ids];
            self.record_experts(scope, number::MUL_MAT_ID, name, &sources, (routing, lanes));

            let name = result.adapter_step(AdapterStep::B);
            self.multiply_outer(pair, name);
            let inner = Source::from(&self.low_rank.inner);
            let sources = [Source::from(&pair.b), inner, ids];
            self.record_experts(scope, number::MUL_MAT_ID, name, &sources, (routing, lanes));

            let sum = sum_name(result, i, pairs.len());
            self.scale_and_add(scope, pair.scale, (result, sum), dst);
        }
    }

    /// Like [`Ops::add_low_rank_of_experts`] without records, for a part of a tensor whose other part has the records.
    pub(super) fn add_low_rank_of_part(
        &mut self,
        projection: &Projection,
        src: &Activation,
        routing: &Routing,
        dst: &mut Activation,
    ) {
        let name = projection.names[0];
        for pair in &projection.linear.weights.low_rank {
            let inner = name.adapter_step(AdapterStep::A);
            self.multiply_inner(pair, inner, src, routing.ids.len());
            self.multiply_outer(pair, name.adapter_step(AdapterStep::B));
            self.scale_outer(pair.scale);
            self.add_outer(dst);
        }
    }

    /// Computes the products of the selected experts with `a`.
    fn multiply_inner(&mut self, pair: &LowRank, name: NodeName, src: &Activation, entries: usize) {
        self.low_rank.inner.shape(name, pair.a.n_out, entries);
        let x = Entries {
            rows: src.data(),
            row_of: RowOf::Every(entries / src.rows.max(1)),
            work: &self.work,
        };
        let out = self.low_rank.inner.data_mut();
        let weights = pair.a.stack();
        matmul::mul_mat_id(self.threads, weights, x, out, &mut self.quantized, || ());
    }

    /// Computes the products of the results of [`Ops::multiply_inner`] with `b`.
    fn multiply_outer(&mut self, pair: &LowRank, name: NodeName) {
        let LowRankBuffers { inner, outer } = &mut self.low_rank;
        outer.shape(name, pair.b.n_out, inner.rows);
        let x = Entries {
            rows: inner.data(),
            row_of: RowOf::Every(1),
            work: &self.work,
        };
        let (out, weights) = (outer.data_mut(), pair.b.stack());
        matmul::mul_mat_id(self.threads, weights, x, out, &mut self.quantized, || ());
    }

    /// Multiplies the products by the scale, adds them to `dst`, and records both.
    fn scale_and_add(
        &mut self,
        scope: &mut Scope,
        scale: f32,
        (result, sum): (NodeName, NodeName),
        dst: &mut Activation,
    ) {
        let product = Source::from(&self.low_rank.outer);
        self.scale_outer(scale);
        let name = result.adapter_step(AdapterStep::Scaled);
        self.low_rank.outer.name = name;
        self.record(scope, number::SCALE, name, &[product]);

        let sources = [Source::from(&*dst), Source::from(&self.low_rank.outer)];
        self.add_outer(dst);
        dst.name = sum;
        self.record(scope, number::ADD, sum, &sources);
    }

    fn scale_outer(&mut self, scale: f32) {
        let outer = &mut self.low_rank.outer;
        let width = outer.width.max(1);
        self.threads.rows(outer.data_mut(), width, |_, row| {
            row.iter_mut().for_each(|x| *x *= scale);
        });
    }

    fn add_outer(&self, dst: &mut Activation) {
        let (products, width) = (self.low_rank.outer.data(), dst.width.max(1));
        self.threads.rows(dst.data_mut(), width, |i, row| {
            let products = &products[i * width..][..width];
            row.iter_mut().zip(products).for_each(|(x, y)| *x += y);
        });
    }
}
