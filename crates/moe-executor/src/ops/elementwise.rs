//! Row-wise and element-wise operations: sums, activations, row lookups.

use crate::activation::{Activation, NodeName};
use crate::buffers::Input;
use crate::cpu::glu::Glu;
use crate::cpu::quant::dequantize_row;
use crate::device_id::DeviceId;
use crate::ops::{Ops, Scope, number};
use crate::recorder::Source;
use crate::weights::{Matrix, Vector};

impl Ops<'_> {
    /// Looks up the embeddings of `tokens`, on the CPU; `dst (token, n_embd)`.
    pub fn get_embeddings(
        &mut self,
        name: NodeName,
        weights: &Matrix,
        tokens: &[u32],
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        dst.shape(name, weights.n_in, tokens.len());
        self.threads.rows(dst.data_mut(), weights.n_in, |i, out| {
            let token = tokens[i] as usize;
            dequantize_row(weights.ty, weights.rows(0, token..token + 1), out)
                .expect("the loader accepts only types with a kernel");
        });
        let ids = input(Input::Tokens, "inp_tokens", tokens);
        self.record(&mut scope, number::GET_ROWS, name, &[weights.into(), ids]);
    }

    /// Copies the rows `rows` of `src` to `dst`. The caller selects the positions for later operations accordingly.
    pub fn get_rows(
        &mut self,
        device: DeviceId,
        name: NodeName,
        src: &mut Activation,
        rows: &[u32],
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        dst.shape(name, src.width, rows.len());
        let on_gpu = self.on(&mut scope, device, |gpu| gpu.get_rows(src, rows, dst));
        if !on_gpu {
            self.fetch(&mut src.values);
            for (&row, out) in rows.iter().zip(dst.data_mut().chunks_exact_mut(src.width)) {
                out.copy_from_slice(src.row(row as usize));
            }
        }
        let sources = [(&*src).into(), input(Input::Wanted, "out_ids", rows)];
        self.record(&mut scope, number::GET_ROWS, name, &sources);
    }

    /// Adds `bias` to each row, in place. If a GPU computed the product, it has added the bias already.
    pub(super) fn bias(
        &mut self,
        mut scope: Scope,
        name: NodeName,
        bias: &Vector,
        x: &mut Activation,
    ) {
        let before = Source::from(&*x);
        if !scope.is_done() {
            self.threads.rows(x.data_mut(), bias.n, |_, row| {
                row.iter_mut().zip(&bias.data).for_each(|(x, b)| *x += b);
            });
        }
        x.name = name;
        self.record(&mut scope, number::ADD, name, &[before, bias.into()]);
    }

    /// Adds `bias` to each row, in place, as an operation that does not follow a product.
    pub fn add_bias(&mut self, name: NodeName, bias: &Vector, x: &mut Activation) {
        let mut scope = self.start();
        let device = x.values.home();
        let done = self.on(&mut scope, device, |gpu| gpu.add_bias(bias, x));
        if !done {
            self.fetch(&mut x.values);
        }
        self.bias(scope, name, bias, x);
    }

    /// Multiplies each row of `x` by the sigmoid of its `score (row, 1)`, in place. Like in llama.cpp's graph, the sigmoid is
    /// `silu(score) / score`.
    pub fn scale_by_sigmoid(
        &mut self,
        device: DeviceId,
        [silu, sigmoid, name]: [NodeName; 3],
        score: &mut Activation,
        weight: &mut Activation,
        x: &mut Activation,
    ) {
        let mut scope = self.start();
        weight.shape(silu, score.width, score.rows);
        let on_gpu = self.on(&mut scope, device, |gpu| {
            gpu.scale_rows_by_sigmoid(score, x)
        });
        if !on_gpu {
            self.fetch(&mut score.values);
            self.fetch(&mut x.values);
            for (out, x) in weight.data_mut().iter_mut().zip(score.data()) {
                *out = x / (1.0 + (-x).exp());
            }
        }
        self.record(&mut scope, number::UNARY, silu, &[(&*score).into()]);

        let before = Source::from(&*weight);
        if !on_gpu {
            for (out, x) in weight.data_mut().iter_mut().zip(score.data()) {
                *out = if *x == 0.0 { 0.5 } else { *out / x };
            }
        }
        weight.name = sigmoid;
        let sources = [before, (&*score).into()];
        self.record(&mut scope, number::DIV, sigmoid, &sources);

        let before = Source::from(&*x);
        if !on_gpu {
            let width = x.width;
            for (row, w) in x.data_mut().chunks_exact_mut(width).zip(weight.data()) {
                row.iter_mut().for_each(|x| *x *= w);
            }
        }
        x.name = name;
        let sources = [before, (&*weight).into()];
        self.record(&mut scope, number::MUL, name, &sources);
    }

    /// `dst = a + b`.
    pub fn add(
        &mut self,
        device: DeviceId,
        name: NodeName,
        a: &mut Activation,
        b: &mut Activation,
        dst: &mut Activation,
    ) {
        let mut scope = self.start();
        dst.shape(name, a.width, a.rows);
        let on_gpu = self.on(&mut scope, device, |gpu| gpu.add(a, b, dst));
        if !on_gpu {
            self.fetch(&mut a.values);
            self.fetch(&mut b.values);
            for ((out, a), b) in dst.data_mut().iter_mut().zip(a.data()).zip(b.data()) {
                *out = a + b;
            }
        }
        let sources = [(&*a).into(), (&*b).into()];
        self.record(&mut scope, number::ADD, name, &sources);
    }

    /// `gate = glu(gate, up)` of a dense block or a shared expert.
    pub fn glu(&mut self, name: NodeName, glu: Glu, gate: &mut Activation, up: &mut Activation) {
        let mut scope = self.start();
        let before = Source::from(&*gate);
        let device = gate.values.home();
        let done = self.on(&mut scope, device, |gpu| gpu.glu(glu, gate, up));
        if !done {
            self.fetch(&mut gate.values);
            self.fetch(&mut up.values);
            glu.apply(self.threads, gate.data_mut(), up.data());
        }
        gate.name = name;
        let sources = [before, (&*up).into()];
        self.record(&mut scope, number::GLU, name, &sources);
    }
}

/// An input vector as a source; `stem` is the name of ggml's tensor.
pub(super) fn input<'a>(input: Input, stem: &'static str, values: &[u32]) -> Source<'a> {
    Source::Buffer {
        name: NodeName::global(stem),
        suffix: "",
        buffer_id: input.buffer_id(),
        address: values.as_ptr() as u64,
        size_bytes: std::mem::size_of_val(values) as u64,
        ne: [values.len() as u64, 1],
        dtype: "i32",
    }
}
