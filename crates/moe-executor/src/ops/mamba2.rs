//! Operations of Mamba-2 layers.

use std::ops::Range;

use moe_trace::LayerId;

use crate::activation::{Activation, NodeName};
use crate::cpu::state_space::{self, ScanInputs, SsmHeads};
use crate::kv_cache::KvCache;
use crate::ops::recurrent::recurrent_states;
use crate::ops::{Ops, number};
use crate::recorder::Source;
use crate::weights::Vector;

impl Ops<'_> {
    /// Copies columns of `src` to `dst (row, columns)`, like [`Ops::columns`], as an operation of its own.
    pub fn copy_columns(
        &mut self,
        name: NodeName,
        columns: Range<usize>,
        src: &mut Activation,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        self.columns_in(&mut scope, name, columns, src, dst);
        let source = Source::view(&*src, " (view)");
        self.record(&mut scope, number::CONT, name, &[source]);
    }

    /// The scan of Mamba-2 ([`state_space::scan`]) over the tokens of each sequence. Updates the states of the layer. `xbc (token,
    /// channels)`, `dt (token, head)`, `decay (head)`, `dst (token, head, dim)`.
    pub fn ssm_scan(
        &mut self,
        (il, name): (LayerId, NodeName),
        heads: SsmHeads,
        decay: &Vector,
        [xbc, dt]: [&mut Activation; 2],
        cache: &mut KvCache,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        dst.shape(name, heads.width(), xbc.rows);
        let device = self.at(il).device;
        let (runs, state) = cache.state_mut(il);
        let done = self.on(&mut scope, device, |gpu| {
            let inputs = [&mut *xbc, &mut *dt];
            gpu.ssm_scan(heads, decay, inputs, (runs, &mut *state), dst)
        });
        if !done {
            self.fetch(&mut xbc.values);
            self.fetch(&mut dt.values);
            self.fetch(&mut state.state);
            for run in runs {
                let of = |width: usize| run.tokens.start * width..run.tokens.end * width;
                let inputs = ScanInputs {
                    xbc: &xbc.data()[of(heads.channels())],
                    dt: &dt.data()[of(heads.n)],
                    a: &decay.data,
                };
                let out = &mut dst.data_mut()[of(heads.width())];
                let state = state.state_of(run.sequence);
                state_space::scan(self.threads, heads, inputs, state, out);
            }
        }
        let sources = [
            recurrent_states(il, state, runs),
            Source::view(&*xbc, " (view)"),
            (&*dt).into(),
            decay.into(),
        ];
        self.record(&mut scope, number::SSM_SCAN, name, &sources);
    }

    /// `y (token, head, dim) += x · factor` with a factor for each head; `x` is the start of each row of `xbc`. The product in `skip`
    /// is an operation of its own.
    pub fn add_scaled_heads(
        &mut self,
        [product, name]: [NodeName; 2],
        heads: SsmHeads,
        factors: &Vector,
        [xbc, skip, y]: [&mut Activation; 3],
    ) {
        let mut scope = self.start();
        let (width, channels, dim) = (heads.width(), heads.channels(), heads.dim);
        skip.shape(product, width, y.rows);
        let device = y.values.home();
        let done = self.on(&mut scope, device, |gpu| {
            let io = [&mut *xbc, &mut *skip, &mut *y];
            gpu.add_scaled_heads(heads, factors, io)
        });
        if !done {
            self.fetch(&mut xbc.values);
            self.fetch(&mut y.values);
            let x = xbc.data();
            self.threads.rows(skip.data_mut(), dim, |i, out| {
                let (token, head) = (i / heads.n, i % heads.n);
                let x = &x[token * channels + head * dim..][..dim];
                let factor = factors.data[head];
                out.iter_mut().zip(x).for_each(|(out, x)| *out = x * factor);
            });
        }
        let sources = [Source::view(&*xbc, " (view)"), factors.into()];
        self.record(&mut scope, number::MUL, product, &sources);

        let before = Source::view(&*y, " (view)");
        if !done {
            let added = skip.data();
            self.threads.rows(y.data_mut(), width, |i, row| {
                let added = &added[i * width..][..width];
                row.iter_mut().zip(added).for_each(|(y, x)| *y += x);
            });
        }
        y.name = name;
        let sources = [before, (&*skip).into()];
        self.record(&mut scope, number::ADD, name, &sources);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::threads::Threads;
    use crate::devices::Devices;
    use crate::recorder::Recorder;

    #[test]
    fn skip_connection_has_a_factor_for_each_head() {
        let threads = Threads::new(1).unwrap();
        let mut ops = Ops::new(&threads, Recorder::new(None), Devices::cpu());
        let heads = SsmHeads {
            n: 3,
            dim: 2,
            n_group: 1,
            n_state: 4,
        };
        let name = NodeName::global("x");
        let mut buffers = [1, 2, 3].map(Activation::new);
        let [xbc, skip, y] = &mut buffers;
        xbc.shape(name, heads.channels(), 2);
        y.shape(name, heads.width(), 2);
        for (i, x) in xbc.data_mut().iter_mut().enumerate() {
            *x = i as f32;
        }
        y.data_mut().fill(0.5);
        let factors = Vector::of_values(vec![1.0, -2.0, 3.0], 1);
        ops.add_scaled_heads([name; 2], heads, &factors, [xbc, skip, y]);
        // The second token starts after the 14 channels of the first.
        let want = [
            0.5, 1.5, -3.5, -5.5, 12.5, 15.5, 14.5, 15.5, -31.5, -33.5, 54.5, 57.5,
        ];
        assert_eq!(buffers[2].data(), want);
    }
}
