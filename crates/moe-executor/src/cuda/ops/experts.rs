//! The selected experts of every token.

use crate::activation::Activation;
use crate::cpu::glu::Glu;
use crate::cuda::launch::{
    Down, Fetched, GateUp, Kernels, MulMatId, Multiply, Rows, ends_products,
};
use crate::cuda::{Device, Ptr, Result, Scratch};
use crate::ops::ExpertScales;
use crate::recorder::Routing;
use crate::weights::{Linear, Matrix};

impl Device {
    /// Gate, up and their activation for the selected experts of every token, without the first `slot` experts. `x` has a row for each
    /// token, or for each selected expert. `slot` is 0 if there is more than one token. The results are in `out`; `up_out` is only used
    /// for activations that the products cannot apply. Returns the address of the quantized results, if the kernel quantizes them (one
    /// token only).
    pub(crate) fn experts_gate_up(
        &mut self,
        [gate, up]: [&Linear; 2],
        glu: Glu,
        x: &mut Activation,
        routing: &mut Routing,
        slot: usize,
        [out, up_out]: [&mut Activation; 2],
    ) -> Result<Option<Ptr>> {
        let Matrix {
            n_out, n_expert, ..
        } = gate.weights;
        let ids = routing.ids.device(self.gpu())?;
        // A row for each expert is a token with one expert.
        let (tokens, k, first_row) = match routing.ids.len() / x.rows.max(1) {
            1 => (x.rows - slot, 1, slot),
            k => (x.rows, k - slot, 0),
        };
        let quantized = match tokens {
            1 => self.scratch(
                Scratch::Hidden,
                Kernels::scratch_size(routing.n_expert_used, n_out),
            )?,
            _ => Ptr::NULL,
        };
        let first = slot * n_out * size_of::<f32>();
        let up_out = if ends_products(glu) {
            Ptr::NULL
        } else {
            up_out.values.fill_device(self.gpu())?.offset(first)
        };
        let operands = GateUp {
            gate: self.experts(&gate.weights, routing, slot, Scratch::Gate)?,
            up: self.experts(&up.weights, routing, slot, Scratch::Up)?,
            gate_bias: self.optional(gate.bias.as_ref())?,
            up_bias: self.optional(up.bias.as_ref())?,
            glu,
            x: Rows {
                x: x.values
                    .device(self.gpu())?
                    .offset(first_row * x.width * size_of::<f32>()),
                quantized: x.quantized(self.gpu()),
            },
            ids: ids.offset(slot * size_of::<i32>()),
            tokens,
            k,
            n_expert,
            out: out.values.fill_device(self.gpu())?.offset(first),
            up_out,
            quantized,
            scratch: self.quantized(x.rows, x.width)?,
            work: self.scratch(Scratch::Worklist, Kernels::work_size(tokens, k, n_expert))?,
        };
        let kernels = self.kernels();
        let is_quantized = kernels.experts_gate_up(self.stream(), &operands)?;
        Ok(is_quantized.then_some(quantized))
    }

    /// Down products and their weighted sum for the experts of one token, whose quantized hidden activations are at `quantized`.
    /// Nothing is written to `experts`. Returns `false` if the down matrices are not resident or no kernel supports them.
    pub(crate) fn experts_down(
        &mut self,
        down: &Linear,
        quantized: Ptr,
        routing: &mut Routing,
        experts: &mut Activation,
        dst: &mut Activation,
    ) -> Result<bool> {
        let Some(weights) = self.resident(&down.weights) else {
            return Ok(false);
        };
        let gpu = self.gpu();
        let [ids, router] = [routing.ids.device(gpu)?, routing.weights.device(gpu)?];
        let product = Down {
            weights,
            bias: self.optional(down.bias.as_ref())?,
            ids,
            router,
            k: routing.n_expert_used,
            quantized,
            out: dst.values.fill_device(self.gpu())?,
        };
        // Records of the fused operation name the buffer on the GPU.
        experts.values.fill_device(self.gpu())?;
        self.kernels().down(self.stream(), &product)
    }

    /// The product of every row of `src` with the matrix of its expert, plus the bias. `src`: `(tokens, k, n_in)`, or `(tokens, n_in)` for
    /// the same row for all experts of a token.
    pub(crate) fn mul_mat_id(
        &mut self,
        linear: &Linear,
        src: &mut Activation,
        routing: &mut Routing,
        dst: &mut Activation,
    ) -> Result<()> {
        let Linear { weights, bias } = linear;
        let entries = routing.ids.len();
        let operands = MulMatId {
            weights: self.experts(weights, routing, 0, Scratch::Down)?,
            bias: self.optional(bias.as_ref())?,
            x: src.values.device(self.gpu())?.into(),
            rows_per: entries / src.rows.max(1),
            ids: routing.ids.device(self.gpu())?,
            tokens: entries / routing.n_expert_used,
            k: routing.n_expert_used,
            n_expert: weights.n_expert,
            out: dst.values.fill_device(self.gpu())?,
            scratch: self.quantized(src.rows, src.width)?,
            work: self.worklist(routing, weights.n_expert)?,
        };
        self.kernels().mul_mat_id(self.stream(), &operands)
    }

    /// As [`Device::mul_mat_id`], with the matrices that Post-Fetch has transferred. Returns for each row whether its matrix is
    /// on the GPU. Other rows of `dst` are not written.
    pub(crate) fn mul_mat_fetched(
        &mut self,
        linear: &Linear,
        src: &mut Activation,
        routing: &mut Routing,
        dst: &mut Activation,
    ) -> Result<Vec<bool>> {
        let Linear { weights, bias } = linear;
        let x = src.values.device(self.gpu())?;
        let ids = routing.ids.device(self.gpu())?;
        let addresses = self.finish_transfers(routing.ids.host())?;
        let is_ready = |&address: &u64| address != Ptr::NULL.0;
        let ready: Vec<bool> = addresses.iter().map(is_ready).collect();
        if !ready.contains(&true) {
            return Ok(ready);
        }
        let start = self.begin_fetched_product()?;
        let table = self.scratch(Scratch::Table, size_of_val(addresses.as_slice()))?;
        self.gpu().upload(table, addresses.as_slice())?;
        let operands = Fetched {
            table,
            ty: weights.ty,
            n_in: weights.n_in,
            n_out: weights.n_out,
            row_size: weights.row_size,
            bias: self.optional(bias.as_ref())?,
            x,
            rows_per: 1,
            ids,
            entries: src.rows,
            out: dst.values.fill_device(self.gpu())?,
        };
        self.kernels().mul_mat_fetched(self.stream(), &operands)?;
        self.end_fetched_product(start)?;
        Ok(ready)
    }

    /// Multiplies the row of each token and slot by the factor of its expert; `x (tokens, k, width)`.
    pub(crate) fn scale_experts(
        &mut self,
        scales: &ExpertScales,
        routing: &mut Routing,
        x: &mut Activation,
    ) -> Result<()> {
        let factors = self.vector(scales.factors)?;
        let ids = routing.ids.device(self.gpu())?;
        let (rows, width) = (x.rows, x.width);
        let x = x.values.update_device(self.gpu())?;
        let operands = Multiply {
            x,
            factors,
            ids,
            rows_per: 1,
            rows,
            width,
            group: width,
            per_row: 1,
            out: x,
        };
        self.kernels().multiply(self.stream(), &operands)
    }

    /// The rows that the experts read if the router weights are applied to them: `rows[token, slot] = weights[token, slot] · x[token]`.
    pub(crate) fn weigh_inputs(
        &mut self,
        x: &mut Activation,
        routing: &mut Routing,
        rows: &mut Activation,
    ) -> Result<()> {
        let factors = routing.weights.device(self.gpu())?;
        let operands = Multiply {
            x: x.values.device(self.gpu())?,
            factors,
            ids: Ptr::NULL,
            rows_per: routing.n_expert_used,
            rows: rows.rows,
            width: x.width,
            group: x.width,
            per_row: 1,
            out: rows.values.fill_device(self.gpu())?,
        };
        self.kernels().multiply(self.stream(), &operands)
    }

    /// The sum of the experts of every token, multiplied by their weights if `is_weighted`.
    pub(crate) fn merge(
        &mut self,
        experts: &mut Activation,
        routing: &mut Routing,
        is_weighted: bool,
        dst: &mut Activation,
    ) -> Result<()> {
        let (width, k) = (experts.width, routing.n_expert_used);
        let gpu = self.gpu();
        let rows = experts.values.device(gpu)?;
        let weights = if is_weighted {
            routing.weights.device(gpu)?
        } else {
            Ptr::NULL
        };
        let out = dst.values.fill_device(gpu)?;
        let kernels = self.kernels();
        kernels.merge(
            self.stream(),
            rows,
            weights,
            experts.rows / k,
            k,
            width,
            out,
        )
    }

    /// `x = max(x, 0)²`, the activation of experts without a gate.
    pub(crate) fn squared_relu(&mut self, x: &mut Activation) -> Result<()> {
        let at = x.values.update_device(self.gpu())?;
        self.kernels()
            .squared_relu(self.stream(), at, x.values.len())
    }
}
