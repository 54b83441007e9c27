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
        self.sigmoid(sigmoid, gate);
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

    /// Copies a range of the columns of each group of `group` columns of `src` to `dst`. In ggml this is a view, so nothing is recorded.
    pub fn view_groups(
        &mut self,
        name: NodeName,
        group: usize,
        range: Range<usize>,
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        self.copy_groups(name, group, &[range], src, dst);
    }

    /// Copies ranges of the columns of each group of `group` columns of `src`: `dst` has the groups of the first range, then those of the
    /// next ones. `view` is the suffix of the name of the view that llama.cpp copies.
    pub fn group_columns(
        &mut self,
        (name, view): (NodeName, &'static str),
        group: usize,
        ranges: &[Range<usize>],
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        self.copy_groups(name, group, ranges, src, dst);
        self.record(&mut scope, number::CONT, name, &[Source::view(&*src, view)]);
    }

    fn copy_groups(
        &mut self,
        name: NodeName,
        group: usize,
        ranges: &[Range<usize>],
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        self.fetch(&mut src.values);
        let group = group.max(1);
        let width = ranges.iter().map(Range::len).sum::<usize>() * (src.width / group);
        dst.shape(name, width, src.rows);
        let (values, row) = (src.data(), src.width);
        self.threads
            .rows(dst.data_mut(), width.max(1), |i, mut out| {
                for range in ranges {
                    for group in values[i * row..][..row].chunks_exact(group) {
                        let (part, rest) = out.split_at_mut(range.len());
                        part.copy_from_slice(&group[range.clone()]);
                        out = rest;
                    }
                }
            });
    }

    /// `dst = src[a] · src[b]` for two ranges of columns of the same length.
    pub fn multiply_columns(
        &mut self,
        name: NodeName,
        [a, b]: [Range<usize>; 2],
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        self.fetch(&mut src.values);
        dst.shape(name, a.len(), src.rows);
        let (values, width) = (src.data(), src.width);
        self.threads.rows(dst.data_mut(), a.len().max(1), |i, out| {
            let row = &values[i * width..][..width];
            let factors = row[a.clone()].iter().zip(&row[b.clone()]);
            out.iter_mut()
                .zip(factors)
                .for_each(|(x, (a, b))| *x = a * b);
        });
        let view = Source::view(&*src, " (view)");
        self.record(&mut scope, number::MUL, name, &[view, view]);
    }

    /// `x *= src[columns]`
    pub fn multiply_by_columns(
        &mut self,
        name: NodeName,
        columns: Range<usize>,
        src: &mut Activation,
        x: &mut Activation,
    ) {
        let mut scope = self.start();
        self.fetch(&mut src.values);
        self.fetch(&mut x.values);
        let (before, width) = (Source::from(&*x), x.width.max(1));
        let (values, row) = (src.data(), src.width);
        self.threads.rows(x.data_mut(), width, |i, out| {
            let factors = &values[i * row..][..row][columns.clone()];
            out.iter_mut()
                .zip(factors)
                .for_each(|(x, factor)| *x *= factor);
        });
        x.name = name;
        let view = Source::view(&*src, " (view)");
        self.record(&mut scope, number::MUL, name, &[view, before]);
    }

    /// `x = sigmoid(x)`
    pub fn sigmoid(&mut self, name: NodeName, x: &mut Activation) {
        self.elementwise(number::UNARY, name, x, |x| 1.0 / (1.0 + (-x).exp()));
    }

    /// `x = x · sigmoid(x)`
    pub fn silu(&mut self, name: NodeName, x: &mut Activation) {
        self.elementwise(number::UNARY, name, x, |x| x / (1.0 + (-x).exp()));
    }

    /// `x = function(x)` for each element.
    pub(super) fn elementwise(
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
