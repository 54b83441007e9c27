//! The operations of a graph: each computes, and leaves a record under the name that llama.cpp gives the node.
//!
//! Where llama.cpp leaves a node unnamed (`node_57`) the record has a name of its own: `attn_out-N` for the attention's
//! output product, `kqv_out-N` for the fused attention itself, `ffn_moe_sum-N` for the partial sums of the experts,
//! `ffn_shexp_gate_silu-N` for half of a sigmoid, `attn_out_rows-N` and `l_out_rows-N` where a prompt is cut to the rows that are wanted. The choice of expert groups,
//! seven nodes there, is two operations here.

mod attention;
mod elementwise;
mod experts;
pub mod number;
mod router;

use std::time::Instant;

use crate::activation::{Activation, NodeName};
use crate::cpu::matmul::{self, Quantized, Worklist};
use crate::cpu::rope::Angles;
use crate::cpu::threads::Threads;
use crate::recorder::{Recorder, Routing, Source};
use crate::weights::{Linear, Matrix};

pub use crate::cpu::glu::Glu;
pub use router::{Gating, Groups, RouterSpec, RouterState};

/// What the router chose for the rows of one layer; handed to the observer of a session.
pub struct Routed<'a> {
    /// Layer.
    pub layer: usize,
    /// Position of each row in its sequence.
    pub positions: &'a [u32],
    /// Router scores before any softmax, bias included `(row, n_expert)`.
    pub logits: &'a [f32],
    /// The choice.
    pub routing: &'a Routing,
}

/// Called after every router.
pub type Observer<'a> = Box<dyn FnMut(&Routed) + 'a>;

/// Runs operations and records them.
pub struct Ops<'a> {
    /// Threads that compute.
    pub threads: &'a Threads,
    /// Where records go.
    pub recorder: Recorder,
    /// Told of every routing.
    pub observer: Option<Observer<'a>>,
    /// Position of each row of the current operations.
    pub positions: Vec<u32>,
    /// Where a value that is no number showed first in this pass.
    pub not_finite: Option<(NodeName, u32)>,
    quantized: Quantized,
    work: Worklist,
    angles: Angles,
    /// Experts of a row while the best are found.
    order: Vec<u32>,
    /// Groups that the rows choose from.
    groups: Vec<u32>,
    /// Sums of the chosen weights.
    sums: Vec<f32>,
}

impl<'a> Ops<'a> {
    /// Operations on `threads`, recorded by `recorder`.
    pub fn new(threads: &'a Threads, recorder: Recorder) -> Ops<'a> {
        Ops {
            threads,
            recorder,
            observer: None,
            positions: Vec::new(),
            not_finite: None,
            quantized: Quantized::default(),
            work: Worklist::default(),
            angles: Angles::default(),
            order: Vec::new(),
            groups: Vec::new(),
            sums: Vec::new(),
        }
    }

    fn record(&mut self, start: Instant, op: u8, dst: NodeName, sources: &[Source]) {
        let first = self.positions.first().copied().unwrap_or(0);
        self.recorder
            .op(start, op, dst, sources, first, self.positions.len());
    }

    /// Notes the first row of `x` that has a value which is not finite.
    pub fn check_finite(&mut self, x: &Activation) {
        if self.not_finite.is_some() {
            return;
        }
        let rows = x.data().chunks_exact(x.width).zip(&self.positions);
        let bad = rows
            .into_iter()
            .find(|(row, _)| row.iter().any(|v| !v.is_finite()));
        self.not_finite = bad.map(|(_, &position)| (x.name, position));
    }

    /// `dst = weights · src` for every row.
    pub fn mul_mat(
        &mut self,
        name: NodeName,
        weights: &Matrix,
        src: &Activation,
        dst: &mut Activation,
    ) {
        let start = self.recorder.start();
        dst.shape(name, weights.n_out, src.rows);
        matmul::mul_mat(
            self.threads,
            weights,
            src.data(),
            dst.data_mut(),
            &mut self.quantized,
        );
        self.record(start, number::MUL_MAT, name, &[weights.into(), src.into()]);
    }

    /// The product of a matrix, then its bias if it has one, each under its own name.
    pub fn linear(
        &mut self,
        [product, biased]: [NodeName; 2],
        linear: &Linear,
        src: &Activation,
        dst: &mut Activation,
    ) {
        self.mul_mat(product, &linear.weights, src, dst);
        if let Some(bias) = &linear.bias {
            self.add_bias(biased, bias, dst);
        }
    }
}
