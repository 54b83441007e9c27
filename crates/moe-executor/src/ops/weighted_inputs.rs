//! Experts whose inputs are multiplied by their weights, instead of their outputs (Llama 4).

use moe_trace::LayerId;

use crate::activation::{Activation, NodeName};
use crate::hot_cache::{LANES, LaneWorklist};
use crate::ops::{Ops, Scope, number, router};
use crate::recorder::{Routing, Source};

/// The input of a layer's experts, and the rows that they read.
pub(super) struct WeightedInputs<'a> {
    /// Activations `(token, n_embd)`.
    pub x: &'a mut Activation,
    /// A row for each token and selected expert: the activations of the token, multiplied by the weight of the expert.
    pub rows: &'a mut Activation,
}

impl Ops<'_> {
    /// Computes the rows `(token, slot, n_embd)`. `weights` is the name of the expert weights.
    pub(super) fn weigh_inputs(
        &mut self,
        il: LayerId,
        weights: NodeName,
        routing: &mut Routing,
        inputs: &mut WeightedInputs,
    ) {
        let mut scope = self.start();
        let k = routing.n_expert_used;
        let (width, n) = (inputs.x.width, routing.weights.len());
        inputs
            .rows
            .shape(NodeName::of("ffn_moe_repeated", il), width, n);
        let device = inputs.x.values.home();
        let done = self.on(&mut scope, device, |gpu| {
            gpu.weigh_inputs(inputs.x, routing, inputs.rows)
        });
        if !done {
            self.fetch(&mut inputs.x.values);
            self.fetch(&mut routing.weights);
            let (x, weights_of) = (inputs.x.data(), routing.weights.host());
            let out = inputs.rows.data_mut();
            self.threads.rows(out, width.max(1), |entry, row| {
                let token = &x[entry / k * width..][..width];
                scale_row(token, weights_of[entry], row);
            });
        }
        self.record_weighted(scope, (il, weights), routing, inputs);
    }

    /// Like [`Ops::weigh_inputs`], with rows in the order of a worklist.
    pub(super) fn weigh_entries(
        &mut self,
        il: LayerId,
        weights: NodeName,
        (work, routing): (&LaneWorklist, &Routing),
        inputs: &mut WeightedInputs,
    ) {
        let scope = self.start();
        let width = inputs.x.width;
        let name = NodeName::of("ffn_moe_repeated", il);
        inputs.rows.shape(name, width, work.len());
        let x = inputs.x.data();
        for lane in LANES {
            let (range, tokens) = (work.range(lane), work.tokens(lane));
            let weights_of = &work.weights()[range.clone()];
            let out = &mut inputs.rows.data_mut()[range.start * width..range.end * width];
            self.threads.rows(out, width.max(1), |entry, row| {
                let token = &x[tokens[entry] as usize * width..][..width];
                scale_row(token, weights_of[entry], row);
            });
        }
        self.record_weighted(scope, (il, weights), routing, inputs);
    }

    /// Records the repetition of the activations for each selected expert, and their multiplication by the weights.
    fn record_weighted(
        &mut self,
        mut scope: Scope,
        (il, weights): (LayerId, NodeName),
        routing: &Routing,
        inputs: &mut WeightedInputs,
    ) {
        let repeated = inputs.rows.name;
        let source = Source::view(&*inputs.x, " (reshaped)");
        self.record(&mut scope, number::REPEAT, repeated, &[source]);
        let before = Source::from(&*inputs.rows);
        let name = NodeName::of("ffn_moe_weighted", il);
        inputs.rows.name = name;
        let sources = [before, router::weights(weights, routing)];
        self.record(&mut scope, number::MUL, name, &sources);
    }
}

/// `out = x · factor`
fn scale_row(x: &[f32], factor: f32, out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o = x * factor);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::threads::Threads;
    use crate::devices::Devices;
    use crate::recorder::Recorder;

    #[test]
    fn rows_are_activations_times_weights() {
        let (n_tokens, k, width) = (3, 2, 8);
        let threads = Threads::new(2).unwrap();
        let mut ops = Ops::new(&threads, Recorder::new(None), Devices::cpu());
        let (mut x, mut rows) = (Activation::new(1), Activation::new(2));
        x.shape(NodeName::global("x"), width, n_tokens);
        let value = |i: usize| i as f32 - 11.0;
        let weight = |i: usize| i as f32 * 0.25 - 0.5;
        for (i, x) in x.data_mut().iter_mut().enumerate() {
            *x = value(i);
        }
        let mut routing = Routing {
            n_expert_used: k,
            ..Routing::default()
        };
        routing.weights.resize(n_tokens * k);
        for (i, w) in routing.weights.host_mut().iter_mut().enumerate() {
            *w = weight(i);
        }
        let mut inputs = WeightedInputs {
            x: &mut x,
            rows: &mut rows,
        };
        let name = NodeName::global("weights");
        ops.weigh_inputs(LayerId(0), name, &mut routing, &mut inputs);
        assert_eq!((rows.rows, rows.width), (n_tokens * k, width));
        for (i, got) in rows.data().iter().enumerate() {
            let (entry, column) = (i / width, i % width);
            let want = f64::from(value(entry / k * width + column)) * f64::from(weight(entry));
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} {want} at {i}");
        }
    }
}
