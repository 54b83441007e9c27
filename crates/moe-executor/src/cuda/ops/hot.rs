//! A lane of the hot cache.

use crate::activation::Activation;
use crate::cpu::glu::Glu;
use crate::cuda::launch::{Down, GateUp, Kernels, MulMatId, Multiply, Rows, ends_products};
use crate::cuda::{Device, Ptr, Result, Scratch};
use crate::device_id::DeviceId;
use crate::hot_cache::Projections;

/// Rows of activations on a GPU.
#[derive(Clone, Copy)]
pub(crate) struct HotInput {
    rows: Rows,
    width: usize,
}

/// A call of a lane.
pub(crate) struct HotCall<'a, 'g> {
    /// The lane.
    pub lane: usize,
    /// Gate, up and down.
    pub linears: Projections<'a, 'g>,
    /// The activation.
    pub glu: Glu,
    /// Whether the router weights are applied to the inputs of the experts instead of their outputs.
    pub weights_first: bool,
    /// The rows of activations.
    pub input: HotInput,
    /// Number of tokens.
    pub tokens: usize,
    /// Entries per token.
    pub k: usize,
    /// Slots and router weights `(tokens, k)`.
    pub entries: Entries<'a>,
}

/// Slots and router weights of a call.
#[derive(Clone, Copy)]
pub(crate) enum Entries<'a> {
    /// Slots, then the bits of the router weights.
    Staged(&'a [u32]),
    /// Addresses on the GPU.
    OnGpu {
        /// i32 slots.
        slots: Ptr,
        /// f32 router weights.
        router: Ptr,
    },
}

impl Device {
    /// The rows of `x (token, n_embd)` on this GPU.
    pub(crate) fn hot_input(&mut self, x: &mut Activation) -> Result<HotInput> {
        Ok(HotInput {
            rows: Rows {
                x: x.values.device(self.gpu())?,
                quantized: x.quantized(self.gpu()),
            },
            width: x.width,
        })
    }

    /// `out[t] = Σ weight · expert(x[t])` over the entries of each token, or `Σ expert(weight · x[t])`.
    pub(crate) fn hot_lane(&mut self, call: &HotCall, out: &mut Activation) -> Result<()> {
        let HotCall { tokens, k, .. } = *call;
        let entries = tokens * k;
        let [gate, up, down] = call.linears;
        let gate = self.hot_weights(call.lane, gate)?;
        let up = self.hot_weights(call.lane, up)?;
        let down = self.hot_weights(call.lane, down)?;
        let (n_slots, n_ff) = (gate.n_slots, gate.weights.n_out);
        let (ids, router) = match call.entries {
            Entries::Staged(staged) => {
                let ids = self.scratch(Scratch::LaneEntries, size_of_val(staged))?;
                (ids, ids.offset(entries * size_of::<i32>()))
            }
            Entries::OnGpu { slots, router } => (slots, router),
        };
        let n_out = down.weights.n_out;
        let rows_size = entries * n_out.max(call.input.width) * size_of::<f32>();
        let rows = self.scratch(Scratch::LaneRows, rows_size)?;
        // With weights first, each entry is a token with one expert, whose row is overwritten by its result.
        let (x, x_tokens, x_k) = if call.weights_first {
            (Rows::from(rows), entries, 1)
        } else {
            (call.input.rows, tokens, k)
        };
        let quantized = match x_tokens {
            1 => self.scratch(Scratch::Hidden, Kernels::scratch_size(k, n_ff))?,
            _ => Ptr::NULL,
        };
        // The products with `up` are after the hidden activations.
        let hidden_size = entries * n_ff * size_of::<f32>();
        let n_hidden = if ends_products(call.glu) { 1 } else { 2 };
        let hidden = self.scratch(Scratch::LaneHidden, n_hidden * hidden_size)?;
        let sizes = [(tokens, k), (x_tokens, x_k)];
        let work = sizes.map(|(tokens, k)| Kernels::work_size(tokens, k, n_slots));
        let work = self.scratch(Scratch::Worklist, work[0].max(work[1]))?;
        let operands = GateUp {
            gate: gate.weights,
            up: up.weights,
            gate_bias: gate.bias,
            up_bias: up.bias,
            glu: call.glu,
            x,
            ids,
            tokens: x_tokens,
            k: x_k,
            n_expert: n_slots,
            out: hidden,
            up_out: hidden.offset(hidden_size),
            quantized,
            scratch: self.quantized(x_tokens, call.input.width)?,
            work,
        };
        if let Entries::Staged(staged) = call.entries {
            self.gpu().upload(ids, staged)?;
        }
        if call.weights_first {
            let weighted = Multiply {
                x: call.input.rows.x,
                factors: router,
                ids: Ptr::NULL,
                rows_per: k,
                rows: entries,
                width: call.input.width,
                group: call.input.width,
                per_row: 1,
                out: rows,
            };
            self.kernels().multiply(self.stream(), &weighted)?;
        }
        let is_quantized = self.kernels().experts_gate_up(self.stream(), &operands)?;
        let sum = out.values.fill_device(self.gpu())?;
        if is_quantized && !call.weights_first {
            let product = Down {
                weights: down.weights,
                bias: down.bias,
                ids,
                router,
                k,
                quantized,
                out: sum,
            };
            if self.kernels().down(self.stream(), &product)? {
                return Ok(());
            }
        }
        let operands = MulMatId {
            weights: down.weights,
            bias: down.bias,
            x: hidden.into(),
            rows_per: 1,
            ids,
            tokens,
            k,
            n_expert: n_slots,
            out: rows,
            scratch: self.quantized(entries, n_ff)?,
            work,
        };
        self.kernels().mul_mat_id(self.stream(), &operands)?;
        let router = if call.weights_first {
            Ptr::NULL
        } else {
            router
        };
        let kernels = self.kernels();
        kernels.merge(self.stream(), rows, router, tokens, k, n_out, sum)
    }

    /// `dst += x`. The kernel reads small values from CPU memory.
    pub(crate) fn add_to(&mut self, dst: &mut Activation, x: &mut Activation) -> Result<()> {
        let pinned = match x.values.home() {
            DeviceId::Cpu => self.pinned_sum(x.data())?,
            DeviceId::Gpu(_) => None,
        };
        let gpu = self.gpu();
        let sum = dst.values.update_device(gpu)?;
        let more = match pinned {
            Some(pinned) => pinned,
            None => x.values.device(gpu)?,
        };
        self.kernels()
            .add(self.stream(), sum, more, dst.values.len(), sum)
    }
}
