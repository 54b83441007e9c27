//! Operations of the chosen experts.

use crate::activation::{Activation, NodeName};
use crate::cpu::matmul;
use crate::ops::{Ops, number, router};
use crate::recorder::{Routing, Source};
use crate::weights::{Matrix, Vector};

/// Activation between the up and the down projection of an expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Glu {
    /// `silu(gate) · up`.
    Swiglu,
    /// gpt-oss: gate and up clamped to ±7, `gate · sigmoid(1.702 gate) · (up + 1)`.
    SwigluOai,
}

impl Ops<'_> {
    /// Groups the rows by expert for the products that follow.
    pub fn plan_experts(&mut self, routing: &Routing, n_expert: usize) {
        self.work.fill(&routing.ids, n_expert);
    }

    /// Product of every row with each of its experts. `src` has one row a token (read through ` (reshaped)`), or one
    /// for each token and slot; `dst (token, slot, n_out)`.
    pub fn mul_mat_id(
        &mut self,
        name: NodeName,
        il: usize,
        weights: &Matrix,
        src: &Activation,
        routing: &Routing,
        dst: &mut Activation,
    ) {
        let start = self.recorder.start();
        let entries = routing.ids.len();
        let rows_per = entries / src.rows.max(1);
        dst.shape(name, weights.n_out, entries);
        matmul::mul_mat_id(
            self.threads,
            weights,
            src.data(),
            rows_per,
            &self.work,
            dst.data_mut(),
            &mut self.quantized,
        );
        let suffix = if rows_per > 1 { " (reshaped)" } else { "" };
        let sources = [
            weights.into(),
            Source::view(src, suffix),
            router::ids(il, routing),
        ];
        self.recorder.experts(
            start,
            number::MUL_MAT_ID,
            name,
            &sources,
            &self.positions,
            routing,
        );
    }

    /// Adds each expert's own bias, in place.
    pub fn add_id(
        &mut self,
        name: NodeName,
        il: usize,
        bias: &Vector,
        routing: &Routing,
        x: &mut Activation,
    ) {
        let start = self.recorder.start();
        let before = Source::from(&*x);
        for (row, &id) in x.data_mut().chunks_exact_mut(bias.n).zip(&routing.ids) {
            let bias = &bias.data[id as usize * bias.n..][..bias.n];
            row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
        }
        x.name = name;
        let sources = [before, bias.into(), router::ids(il, routing)];
        self.recorder.experts(
            start,
            number::ADD_ID,
            name,
            &sources,
            &self.positions,
            routing,
        );
    }

    /// The gated activation, into `gate`.
    pub fn glu(&mut self, name: NodeName, glu: Glu, gate: &mut Activation, up: &Activation) {
        let start = self.recorder.start();
        let before = Source::from(&*gate);
        let pairs = gate.data_mut().iter_mut().zip(up.data());
        match glu {
            Glu::Swiglu => pairs.for_each(|(g, u)| *g = *g / (1.0 + (-*g).exp()) * u),
            Glu::SwigluOai => pairs.for_each(|(g, u)| {
                let x = g.min(7.0);
                *g = x / (1.0 + (-1.702 * x).exp()) * (u.clamp(-7.0, 7.0) + 1.0);
            }),
        }
        gate.name = name;
        self.record(start, number::GLU, name, &[before, up.into()]);
    }

    /// Weighs the experts of every token and adds them up; `weights_name` is the node that the weights come from.
    pub fn merge_experts(
        &mut self,
        il: usize,
        weights_name: NodeName,
        routing: &Routing,
        experts: &mut Activation,
        dst: &mut Activation,
    ) {
        let name = |stem| NodeName::of(stem, il);
        let (width, k) = (experts.width, routing.n_expert_used);

        let start = self.recorder.start();
        let before = Source::from(&*experts);
        for (row, weight) in experts
            .data_mut()
            .chunks_exact_mut(width)
            .zip(&routing.weights)
        {
            row.iter_mut().for_each(|x| *x *= weight);
        }
        experts.name = name("ffn_moe_weighted");
        let sources = [before, router::weights(weights_name, routing)];
        self.record(start, number::MUL, experts.name, &sources);

        let tokens = experts.rows / k;
        dst.shape(name("ffn_moe_out"), width, tokens);
        // The first two slots are one addition; a single slot is llama.cpp's plain copy.
        for slot in 1..k.max(2) {
            let start = self.recorder.start();
            let summed = Source::from(&*dst);
            let rows = experts.data().chunks_exact(width * k);
            for (row, out) in rows.zip(dst.data_mut().chunks_exact_mut(width)) {
                let slot_row = |slot: usize| &row[slot * width..(slot + 1) * width];
                match (slot, k) {
                    (1, 1) => out.copy_from_slice(slot_row(0)),
                    (1, _) => {
                        let pairs = slot_row(0).iter().zip(slot_row(1));
                        out.iter_mut().zip(pairs).for_each(|(o, (a, b))| *o = a + b);
                    }
                    _ => out
                        .iter_mut()
                        .zip(slot_row(slot))
                        .for_each(|(o, x)| *o += x),
                }
            }
            let last = slot + 1 >= k;
            dst.name = name(if last { "ffn_moe_out" } else { "ffn_moe_sum" });
            let view = Source::view(experts, " (view)");
            match (slot, k) {
                (1, 1) => self.record(start, number::CONT, dst.name, &[view]),
                (1, _) => self.record(start, number::ADD, dst.name, &[view, view]),
                _ => self.record(start, number::ADD, dst.name, &[summed, view]),
            }
        }
    }
}
