//! Factors of experts: the results of an expert are multiplied by its factor.

use moe_trace::LayerId;

use crate::activation::{Activation, NodeName};
use crate::ops::router::{self, SCALES_BUFFER};
use crate::ops::{Ops, Scope, number};
use crate::recorder::{Routing, Source};
use crate::weights::Vector;

/// The factors of the experts of a layer.
#[derive(Clone, Copy)]
pub struct ExpertScales<'a> {
    /// The layer.
    pub il: LayerId,
    /// Factors `(n_expert)`.
    pub factors: &'a Vector,
    /// Names of three nodes: the factors for each token, those of its selected experts, and the product.
    pub names: [NodeName; 3],
}

impl Ops<'_> {
    /// Multiplies the row of each token and slot by the factor of its expert; `x (token, slot, width)`.
    pub(super) fn scale_experts(
        &mut self,
        scope: &mut Scope,
        scales: &ExpertScales,
        routing: &Routing,
        x: &mut Activation,
    ) {
        let before = Source::from(&*x);
        if !scope.is_done() {
            let width = x.width;
            self.scale_rows_of_experts(scales, routing.ids.host(), (x.data_mut(), width));
        }
        self.record_expert_scales(scope, scales, routing, (before, x));
    }

    /// Multiplies each row of `x (row, width)` by the factor of its expert; `ids (row)`.
    pub(super) fn scale_rows_of_experts(
        &self,
        scales: &ExpertScales,
        ids: &[i32],
        (x, width): (&mut [f32], usize),
    ) {
        let factors = &scales.factors.data;
        self.threads.rows(x, width.max(1), |i, row| {
            let factor = factors[ids[i] as usize];
            row.iter_mut().for_each(|x| *x *= factor);
        });
    }

    /// Records the multiplication by the factors of the experts. llama.cpp first repeats the factors for each token, and selects those
    /// of the experts; the executor reads the vector, so that these results have no memory.
    pub(super) fn record_expert_scales(
        &mut self,
        scope: &mut Scope,
        scales: &ExpertScales,
        routing: &Routing,
        (before, x): (Source, &mut Activation),
    ) {
        let [repeated, selected, scaled] = scales.names;
        let factors = Source::of_vector(scales.factors, " (reshaped)");
        self.record(scope, number::REPEAT, repeated, &[factors]);
        let of_experts = |name| Source::Buffer {
            name,
            suffix: "",
            buffer_id: SCALES_BUFFER,
            address: 0,
            size_bytes: 0,
            ne: [0, 0],
            dtype: "f32",
        };
        let ids = router::ids(scales.il, routing);
        let sources = [of_experts(repeated), ids];
        self.record(scope, number::GET_ROWS, selected, &sources);
        x.name = scaled;
        let sources = [before, of_experts(selected)];
        self.record(scope, number::MUL, scaled, &sources);
    }
}
