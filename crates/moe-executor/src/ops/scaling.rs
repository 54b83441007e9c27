//! Element-wise operations with a constant or a gate. No GPU has kernels for them.

use std::ops::Range;

use crate::activation::{Activation, NodeName};
use crate::ops::{Ops, number};
use crate::recorder::Source;

impl Ops<'_> {
    /// `x *= factor`
    pub fn scale(&mut self, name: NodeName, factor: f32, x: &mut Activation) {
        self.elementwise(number::SCALE, name, x, |x| x * factor);
    }

    /// Limits `x` to `-limit..=limit`.
    pub fn clamp(&mut self, name: NodeName, limit: f32, x: &mut Activation) {
        self.elementwise(number::CLAMP, name, x, |x| x.clamp(-limit, limit));
    }

    /// `x *= sigmoid(gate)`: each element of a row `(row, width)`, or all elements of a head if the gate has one value per head
    /// `(row, n_head)`. The sigmoid is an operation of its own, in place.
    pub fn multiply_by_sigmoid(
        &mut self,
        [sigmoid, name]: [NodeName; 2],
        gate: &mut Activation,
        x: &mut Activation,
    ) {
        self.elementwise(number::UNARY, sigmoid, gate, |x| 1.0 / (1.0 + (-x).exp()));
        let mut scope = self.start();
        self.fetch(&mut x.values);
        let before = Source::from(&*x);
        let head = x.width / gate.width.max(1);
        let gates = gate.data();
        self.threads.rows(x.data_mut(), head.max(1), |i, head| {
            head.iter_mut().for_each(|x| *x *= gates[i]);
        });
        x.name = name;
        let sources = [before, (&*gate).into()];
        self.record(&mut scope, number::MUL, name, &sources);
    }

    /// Copies columns of `src` to `dst (row, columns)`. In ggml this is a view, so nothing is recorded.
    pub fn columns(
        &mut self,
        name: NodeName,
        columns: Range<usize>,
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        self.fetch(&mut src.values);
        let width = columns.len();
        dst.shape(name, width, src.rows);
        let rows = src.data().chunks_exact(src.width.max(1));
        for (row, out) in rows.zip(dst.data_mut().chunks_exact_mut(width.max(1))) {
            out.copy_from_slice(&row[columns.clone()]);
        }
    }

    fn elementwise(
        &mut self,
        op: u8,
        name: NodeName,
        x: &mut Activation,
        function: impl Fn(f32) -> f32 + Sync,
    ) {
        let mut scope = self.start();
        self.fetch(&mut x.values);
        let before = Source::from(&*x);
        let width = x.width.max(1);
        self.threads.rows(x.data_mut(), width, |_, row| {
            row.iter_mut().for_each(|x| *x = function(*x));
        });
        x.name = name;
        self.record(&mut scope, op, name, &[before]);
    }
}
