//! Operations of the chosen experts.

use crate::activation::{Activation, NodeName};
use crate::cpu::glu::Glu;
use crate::cpu::matmul;
use crate::ops::{Ops, number, router};
use crate::recorder::{Routing, Source};
use crate::weights::{Matrix, Vector};

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
        let start = self.recorder.start_experts();
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
        let start = self.recorder.start_experts();
        let before = Source::from(&*x);
        self.threads.rows(x.data_mut(), bias.n, |i, row| {
            let bias = &bias.data[routing.ids[i] as usize * bias.n..][..bias.n];
            row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
        });
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
        glu.apply(self.threads, gate.data_mut(), up.data());
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
        self.threads.rows(experts.data_mut(), width, |i, row| {
            row.iter_mut().for_each(|x| *x *= routing.weights[i]);
        });
        experts.name = name("ffn_moe_weighted");
        let sources = [before, router::weights(weights_name, routing)];
        self.record(start, number::MUL, experts.name, &sources);

        let tokens = experts.rows / k;
        dst.shape(name("ffn_moe_out"), width, tokens);
        // The first two slots are one addition; a single slot is llama.cpp's plain copy.
        for slot in 1..k.max(2) {
            let start = self.recorder.start();
            let summed = Source::from(&*dst);
            let rows = experts.data();
            self.threads.rows(dst.data_mut(), width, |t, out| {
                let slot_row = |slot: usize| &rows[(t * k + slot) * width..][..width];
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
            });
            let last = slot + 1 >= k;
            dst.name = name(if last { "ffn_moe_out" } else { "ffn_moe_sum" });
            let view = Source::slots(experts, k);
            match (slot, k) {
                (1, 1) => self.record(start, number::CONT, dst.name, &[view]),
                (1, _) => self.record(start, number::ADD, dst.name, &[view, view]),
                _ => self.record(start, number::ADD, dst.name, &[summed, view]),
            }
        }
    }
}
