//! Element-wise operations with constants, vectors or gates.

use std::ops::Range;

use crate::activation::{Activation, NodeName};
use crate::buffers::Input;
use crate::cpu::map::Map;
use crate::ops::{Ops, Scope, number};
use crate::recorder::Source;
use crate::weights::Vector;

impl Ops<'_> {
    /// `x *= factor`
    pub fn scale(&mut self, name: NodeName, factor: f32, x: &mut Activation) {
        self.map(number::SCALE, name, Map::Scale(factor), x);
    }

    /// `x = bound · tanh(x / bound)`, in three operations.
    pub fn bound(&mut self, [scaled, tanh, name]: [NodeName; 3], bound: f32, x: &mut Activation) {
        self.scale(scaled, 1.0 / bound, x);
        self.map(number::UNARY, tanh, Map::Tanh, x);
        self.scale(name, bound, x);
    }

    /// `x *= factors` for each group of `factors.n` elements; `factors (n)`.
    pub fn multiply(&mut self, name: NodeName, factors: &Vector, x: &mut Activation) {
        let mut scope = self.start();
        let before = Source::from(&*x);
        let device = x.values.home();
        let done = self.on(&mut scope, device, |gpu| gpu.multiply(factors, x));
        if !done {
            self.fetch(&mut x.values);
            let width = x.width.max(1);
            self.threads.rows(x.data_mut(), width, |_, row| {
                multiply_row(row, &factors.data);
            });
        }
        x.name = name;
        self.record(&mut scope, number::MUL, name, &[before, factors.into()]);
    }

    /// Multiplies each row of `x` by a function of its position. `stem` is the name of ggml's input with the values of the function.
    pub fn scale_rows(
        &mut self,
        name: NodeName,
        stem: &'static str,
        factor: impl Fn(u32) -> f32,
        x: &mut Activation,
    ) {
        let mut scope = self.start();
        let before = Source::from(&*x);
        let mut factors = std::mem::take(&mut self.row_factors);
        let values = self.positions.iter().map(|&position| factor(position));
        // Layers with the same factors share their copy on a GPU.
        if !factors.host().iter().copied().eq(values.clone()) {
            let own = factors.host_mut();
            own.clear();
            own.extend(values);
        }
        let device = x.values.home();
        let done = self.on(&mut scope, device, |gpu| gpu.multiply_rows(&mut factors, x));
        if !done {
            self.fetch(&mut x.values);
            let (factors, width) = (factors.host(), x.width.max(1));
            self.threads.rows(x.data_mut(), width, |i, row| {
                let factor = factors[i];
                row.iter_mut().for_each(|x| *x *= factor);
            });
        }
        self.row_factors = factors;
        x.name = name;
        let factors = self.row_factors.host();
        let factors = Source::Buffer {
            name: NodeName::global(stem),
            suffix: "",
            buffer_id: Input::Factors.buffer_id(),
            address: factors.as_ptr() as u64,
            size_bytes: size_of_val(factors) as u64,
            ne: [1, factors.len() as u64],
            dtype: "f32",
        };
        self.record(&mut scope, number::MUL, name, &[before, factors]);
    }

    /// Limits `x` to `-limit..=limit`.
    pub fn clamp(&mut self, name: NodeName, limit: f32, x: &mut Activation) {
        self.map(number::CLAMP, name, Map::Clamp(limit), x);
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
        let before = Source::from(&*x);
        let device = x.values.home();
        let done = self.on(&mut scope, device, |gpu| {
            gpu.multiply_rows(&mut gate.values, x)
        });
        if !done {
            self.fetch(&mut gate.values);
            self.fetch(&mut x.values);
            let head = x.width / gate.width.max(1);
            let gates = gate.data();
            self.threads.rows(x.data_mut(), head.max(1), |i, head| {
                head.iter_mut().for_each(|x| *x *= gates[i]);
            });
        }
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
        let mut scope = self.start();
        self.columns_in(&mut scope, name, columns, src, dst);
    }

    /// [`Ops::columns`] as the operation of `scope`.
    pub(super) fn columns_in(
        &mut self,
        scope: &mut Scope,
        name: NodeName,
        columns: Range<usize>,
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        let width = columns.len();
        dst.shape(name, width, src.rows);
        let device = src.values.home();
        let first = columns.start;
        if self.on(scope, device, |gpu| gpu.copy_columns(src, first, dst)) {
            return;
        }
        self.fetch(&mut src.values);
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
        let mut scope = self.start();
        self.copy_groups(&mut scope, name, group, &[range], src, dst);
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
        self.copy_groups(&mut scope, name, group, ranges, src, dst);
        self.record(&mut scope, number::CONT, name, &[Source::view(&*src, view)]);
    }

    fn copy_groups(
        &mut self,
        scope: &mut crate::ops::Scope,
        name: NodeName,
        group: usize,
        ranges: &[Range<usize>],
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        let group = group.max(1);
        let width = ranges.iter().map(Range::len).sum::<usize>() * (src.width / group);
        dst.shape(name, width, src.rows);
        let device = src.values.home();
        if self.on(scope, device, |gpu| {
            gpu.copy_groups(group, ranges, src, dst)
        }) {
            return;
        }
        self.fetch(&mut src.values);
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
        dst.shape(name, a.len(), src.rows);
        let (device, starts) = (src.values.home(), [a.start, b.start]);
        let done = self.on(&mut scope, device, |gpu| {
            gpu.multiply_columns(starts, src, dst)
        });
        if !done {
            self.fetch(&mut src.values);
            let (values, width) = (src.data(), src.width);
            self.threads.rows(dst.data_mut(), a.len().max(1), |i, out| {
                let row = &values[i * width..][..width];
                let factors = row[a.clone()].iter().zip(&row[b.clone()]);
                out.iter_mut()
                    .zip(factors)
                    .for_each(|(x, (a, b))| *x = a * b);
            });
        }
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
        let before = Source::from(&*x);
        let device = x.values.home();
        let done = self.on(&mut scope, device, |gpu| {
            gpu.multiply_by_columns(columns.start, src, x)
        });
        if !done {
            self.fetch(&mut src.values);
            self.fetch(&mut x.values);
            let width = x.width.max(1);
            let (values, row) = (src.data(), src.width);
            self.threads.rows(x.data_mut(), width, |i, out| {
                let factors = &values[i * row..][..row][columns.clone()];
                out.iter_mut()
                    .zip(factors)
                    .for_each(|(x, factor)| *x *= factor);
            });
        }
        x.name = name;
        let view = Source::view(&*src, " (view)");
        self.record(&mut scope, number::MUL, name, &[view, before]);
    }

    /// `x = sigmoid(x)`
    pub fn sigmoid(&mut self, name: NodeName, x: &mut Activation) {
        self.map(number::UNARY, name, Map::Sigmoid, x);
    }

    /// `x = x · sigmoid(x)`
    pub fn silu(&mut self, name: NodeName, x: &mut Activation) {
        self.map(number::UNARY, name, Map::Silu, x);
    }

    /// `x = map(x)` for each element.
    pub(super) fn map(&mut self, op: u8, name: NodeName, map: Map, x: &mut Activation) {
        let mut scope = self.start();
        let before = Source::from(&*x);
        let device = x.values.home();
        if !self.on(&mut scope, device, |gpu| gpu.map(map, x)) {
            self.fetch(&mut x.values);
            let width = x.width.max(1);
            self.threads
                .rows(x.data_mut(), width, |_, row| map.apply(row));
        }
        x.name = name;
        self.record(&mut scope, op, name, &[before]);
    }
}

/// Multiplies each group of `factors.len()` elements by the factors.
fn multiply_row(row: &mut [f32], factors: &[f32]) {
    if let [factor] = factors {
        row.iter_mut().for_each(|x| *x *= factor);
        return;
    }
    for group in row.chunks_exact_mut(factors.len().max(1)) {
        group.iter_mut().zip(factors).for_each(|(x, w)| *x *= w);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::threads::Threads;
    use crate::devices::Devices;
    use crate::recorder::Recorder;

    #[test]
    fn rows_have_the_factor_of_their_position() {
        let threads = Threads::new(2).unwrap();
        let mut ops = Ops::new(&threads, Recorder::new(None), Devices::cpu());
        ops.positions.extend([5, 2]);
        let name = NodeName::global("x");
        let mut x = Activation::new(1);
        x.shape(name, 3, 2);
        x.data_mut()
            .copy_from_slice(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        ops.scale_rows(name, "factors", |position| position as f32, &mut x);
        assert_eq!(x.data(), [0.0, 5.0, 10.0, 6.0, 8.0, 10.0]);
    }

    #[test]
    fn factors_repeat_for_each_group() {
        let x: Vec<f32> = (0..12).map(|i| i as f32 - 4.5).collect();
        for factors in [&[0.5f32][..], &[2.0, -1.0, 0.25], &[1.5; 12]] {
            let mut row = x.clone();
            multiply_row(&mut row, factors);
            for (i, (got, x)) in row.iter().zip(&x).enumerate() {
                let want = f64::from(*x) * f64::from(factors[i % factors.len()]);
                assert!((f64::from(*got) - want).abs() < 1e-6, "{got} {want}");
            }
        }
    }
}
