//! Products of the experts that tokens have chosen, and the weighted sum of their results.
//!
//! An entry is a token and a slot: number `token * k + slot`. With few entries each is a matrix × vector product of its own.
//! With many the device sorts them by expert, and one grouped product goes over all of them.

use cudarc::driver::CudaStream;
use moe_gguf::GgmlType;

use super::products::{Grouped, Many, One, code};
use super::{Kernels, Rows, Weights, grid};
use crate::cpu::glu::Glu;
use crate::cuda::kernel::kernels;
use crate::cuda::module::args;
use crate::cuda::{Ptr, Result};

kernels! {
    GROUP_ENTRIES = "group_entries" => (ids: Ptr, n: U32, k: U32, wide: Bool, bounds: Ptr, list: Ptr);
    QUANTIZE = "quantize" => (x: Ptr, n: U64, codes: Ptr, groups: Ptr);
    MERGE = "merge" => (experts: Ptr, weights: Ptr, k: U32, width: U32, n: U64, out: Ptr);
}

/// `out[entry] = weights[expert of entry] · x[entry / rows_per] + bias[expert of entry]`.
#[derive(Clone, Copy, Debug)]
pub struct MulMatId {
    /// A matrix an expert.
    pub weights: Weights,
    /// f32 `(n_expert, n_out)`, or none.
    pub bias: Ptr,
    /// `(tokens * k / rows_per, n_in)`; quantized with one row alone.
    pub x: Rows,
    /// Entries that read the same row of `x`: `k` with a row a token, 1 with a row an entry.
    pub rows_per: usize,
    /// i32 `(tokens, k)`, each below `n_expert`.
    pub ids: Ptr,
    /// Number of tokens.
    pub tokens: usize,
    /// Experts of a token.
    pub k: usize,
    /// Experts of the layer.
    pub n_expert: usize,
    /// f32 `(tokens, k, n_out)`.
    pub out: Ptr,
    /// [`Kernels::scratch_size`] bytes.
    pub scratch: Ptr,
    /// [`Kernels::work_size`] bytes.
    pub work: Ptr,
}

/// `out[entry] = glu(gate · x[token] + gate_bias, up · x[token] + up_bias)`, all of the entry's expert.
#[derive(Clone, Copy, Debug)]
pub struct GateUp {
    /// A matrix an expert.
    pub gate: Weights,
    /// A matrix an expert, of the gate's shape.
    pub up: Weights,
    /// f32 `(n_expert, n_ff)`, or none.
    pub gate_bias: Ptr,
    /// f32 `(n_expert, n_ff)`, or none.
    pub up_bias: Ptr,
    /// The activation.
    pub glu: Glu,
    /// `(tokens, n_in)`; quantized with one token alone.
    pub x: Rows,
    /// i32 `(tokens, k)`, each below `n_expert`.
    pub ids: Ptr,
    /// Number of tokens.
    pub tokens: usize,
    /// Experts of a token.
    pub k: usize,
    /// Experts of the layer.
    pub n_expert: usize,
    /// f32 `(tokens, k, n_ff)`.
    pub out: Ptr,
    /// [`Kernels::scratch_size`] bytes for `k` rows of `n_ff`: with one token the same once more, quantized, where `n_ff` is
    /// whole times 32; or none.
    pub quantized: Ptr,
    /// [`Kernels::scratch_size`] bytes.
    pub scratch: Ptr,
    /// [`Kernels::work_size`] bytes.
    pub work: Ptr,
}

/// As [`MulMatId`] for matrices at addresses of their own.
#[derive(Clone, Copy, Debug)]
pub struct Fetched {
    /// u64 `(entries)`: where each entry's matrix lies. Entries with address 0 are left out, and their rows of `out` as they
    /// were.
    pub table: Ptr,
    /// Type of the rows.
    pub ty: GgmlType,
    /// Elements of a row.
    pub n_in: usize,
    /// Rows of a matrix.
    pub n_out: usize,
    /// Bytes of a row.
    pub row_size: usize,
    /// f32 `(n_expert, n_out)`, or none.
    pub bias: Ptr,
    /// f32 `(entries / rows_per, n_in)`.
    pub x: Ptr,
    /// Entries that read the same row of `x`.
    pub rows_per: usize,
    /// i32 `(entries)`; for the bias alone.
    pub ids: Ptr,
    /// Number of entries.
    pub entries: usize,
    /// f32 `(entries, n_out)`.
    pub out: Ptr,
}

/// Threads of a block.
const THREADS: usize = 256;

/// The experts that tokens have chosen.
#[derive(Clone, Copy)]
struct Selection {
    ids: Ptr,
    tokens: usize,
    k: usize,
    n_expert: usize,
    work: Ptr,
}

impl Selection {
    fn entries(&self) -> usize {
        self.tokens * self.k
    }

    /// Whether each entry is computed on its own: an expert has then about one.
    fn is_sparse(&self) -> bool {
        self.tokens <= 1 || self.entries() <= self.n_expert
    }

    fn grouped(&self, rows_per: usize) -> Grouped {
        Grouped {
            list: self.work.offset(bounds_size(self.n_expert)),
            bounds: self.work,
            wide: is_wide(self.tokens, self.k),
            k: self.k,
            rows_per,
            entries: self.entries(),
            n_expert: self.n_expert,
        }
    }
}

impl MulMatId {
    fn choice(&self) -> Selection {
        Selection {
            ids: self.ids,
            tokens: self.tokens,
            k: self.k,
            n_expert: self.n_expert,
            work: self.work,
        }
    }

    /// Rows of `x`.
    fn rows(&self) -> usize {
        self.tokens * self.k / self.rows_per.max(1)
    }

    /// As a product of single entries, behind [`Kernels::quantize_rows`].
    fn one(&self, glu: Option<Glu>) -> One<'_> {
        One {
            weights: &self.weights,
            up: Ptr::NULL,
            table: Ptr::NULL,
            ids: self.ids,
            bias: self.bias,
            up_bias: Ptr::NULL,
            x: match self.tokens {
                1 => self.x,
                _ => Rows {
                    quantized: self.scratch,
                    ..self.x
                },
            },
            entries: self.tokens * self.k,
            rows_per: self.rows_per,
            glu: code(glu),
            out: self.out,
        }
    }
}

impl GateUp {
    /// The product of one of the two.
    fn half(&self, weights: Weights, bias: Ptr) -> MulMatId {
        MulMatId {
            weights,
            bias,
            x: self.x,
            rows_per: self.k,
            ids: self.ids,
            tokens: self.tokens,
            k: self.k,
            n_expert: self.n_expert,
            out: self.out,
            scratch: self.scratch,
            work: self.work,
        }
    }
}

impl Kernels {
    /// Bytes of working memory for sorting entries by expert.
    pub fn work_size(tokens: usize, k: usize, n_expert: usize) -> usize {
        let code = if is_wide(tokens, k) { 8 } else { 4 };
        bounds_size(n_expert) + tokens * k * code
    }

    /// The product of every entry with its expert.
    ///
    /// # Errors
    /// No kernel for the type ([`Kernels::supports`]), or the driver's.
    pub fn mul_mat_id(&self, stream: &CudaStream, product: &MulMatId) -> Result<()> {
        self.group_entries(stream, &product.choice())?;
        self.quantize_rows(stream, product)?;
        self.multiply(stream, product, None)
    }

    /// Gate, up and the activation of every entry; one kernel where entries are few and gate and up of one type. Gives whether
    /// they are in `quantized`, too. `x` must not be what the last kernel on the stream made, unless that is not quantized.
    ///
    /// # Errors
    /// No kernel for a type ([`Kernels::supports`]), or the driver's.
    pub fn experts_gate_up(&self, stream: &CudaStream, product: &GateUp) -> Result<bool> {
        let gate = product.half(product.gate, product.gate_bias);
        let up = product.half(product.up, product.up_bias);
        let choice = gate.choice();
        let alike = |of: fn(&Weights) -> usize| of(&gate.weights) == of(&up.weights);
        let one_type = gate.weights.ty == up.weights.ty && alike(|w| w.expert_size);
        if product.tokens == 1
            && one_type
            && let Some(is_quantized) = self.token_gate_up(stream, product)?
        {
            return Ok(is_quantized);
        }
        if choice.is_sparse() && one_type {
            self.quantize_rows(stream, &gate)?;
            let both = One {
                up: up.weights.ptr,
                up_bias: up.bias,
                ..gate.one(Some(product.glu))
            };
            self.mat_vec(stream, &both)?;
            return Ok(false);
        }
        // The gate first; the product of up is stored as the activation of both.
        self.group_entries(stream, &choice)?;
        self.quantize_rows(stream, &gate)?;
        self.multiply(stream, &gate, None)?;
        if !gate.weights.is_quantized() {
            self.quantize_rows(stream, &up)?;
        }
        self.multiply(stream, &up, Some(product.glu))?;
        Ok(false)
    }

    /// A row of `n` activations quantized into [`Kernels::scratch_size`] bytes at `to`, unless that is null; `n` is whole times
    /// 32. The next kernel starts behind it: some read such a row early.
    ///
    /// # Errors
    /// The driver's.
    pub fn quantize_row(&self, stream: &CudaStream, x: Ptr, n: usize, to: Ptr) -> Result<()> {
        if to == Ptr::NULL {
            return Ok(());
        }
        self.start_quantize(stream, x, n, to)?;
        self.follow_copy();
        Ok(())
    }

    /// Quantizes `n` activations, whole times 32.
    pub(super) fn start_quantize(
        &self,
        stream: &CudaStream,
        x: Ptr,
        n: usize,
        to: Ptr,
    ) -> Result<()> {
        let grid = grid((n / 16).div_ceil(THREADS), THREADS);
        let args = args![x, n, to, to.offset(n)];
        self.experts.launch(stream, QUANTIZE, grid, &args)
    }

    /// The products of entries whose matrices lie at addresses of their own.
    ///
    /// # Errors
    /// No kernel for the type ([`Kernels::supports`]), or the driver's.
    pub fn mul_mat_fetched(&self, stream: &CudaStream, product: &Fetched) -> Result<()> {
        let weights = Weights {
            ptr: Ptr::NULL,
            ty: product.ty,
            n_in: product.n_in,
            n_out: product.n_out,
            row_size: product.row_size,
            expert_size: 0,
        };
        let one = One {
            weights: &weights,
            up: Ptr::NULL,
            table: product.table,
            ids: product.ids,
            bias: product.bias,
            up_bias: Ptr::NULL,
            x: product.x.into(),
            entries: product.entries,
            rows_per: product.rows_per,
            glu: code(None),
            out: product.out,
        };
        self.mat_vec(stream, &one)
    }

    /// `out[token] = Σ experts[token, slot] · weights[token, slot]`, slot after slot; `experts (tokens, k, width)`,
    /// `weights (tokens, k)`, `out (tokens, width)`.
    ///
    /// # Errors
    /// The driver's.
    #[allow(clippy::too_many_arguments)] // two inputs, their shape, one output
    pub fn merge(
        &self,
        stream: &CudaStream,
        experts: Ptr,
        weights: Ptr,
        tokens: usize,
        k: usize,
        width: usize,
        out: Ptr,
    ) -> Result<()> {
        let n = tokens * width;
        let grid = grid(n.div_ceil(THREADS), THREADS);
        let args = args![experts, weights, k, width, n, out];
        self.experts.launch(stream, MERGE, grid, &args)
    }

    /// Sorts the entries by expert into the working memory; not where each is computed on its own.
    fn group_entries(&self, stream: &CudaStream, choice: &Selection) -> Result<()> {
        if choice.is_sparse() {
            return Ok(());
        }
        let grouped = choice.grouped(1);
        let args = args![
            choice.ids,
            grouped.entries,
            choice.k,
            grouped.wide,
            grouped.bounds,
            grouped.list,
        ];
        let grid = grid(choice.n_expert, THREADS);
        self.experts.launch(stream, GROUP_ENTRIES, grid, &args)
    }

    /// Quantizes what a product reads; not what one token does: its kernels do so themselves.
    fn quantize_rows(&self, stream: &CudaStream, product: &MulMatId) -> Result<()> {
        if product.tokens == 1 {
            return Ok(());
        }
        let n = product.rows() * product.weights.n_in;
        self.quantize(stream, &product.weights, product.x.x, n, product.scratch)
    }

    /// The products, grouped and quantized as they need.
    fn multiply(&self, stream: &CudaStream, product: &MulMatId, glu: Option<Glu>) -> Result<()> {
        let choice = product.choice();
        if choice.is_sparse() {
            return self.mat_vec(stream, &product.one(glu));
        }
        let many = Many {
            weights: &product.weights,
            bias: product.bias,
            x: product.x.x,
            rows: product.rows(),
            scratch: product.scratch,
            grouped: choice.grouped(product.rows_per),
            glu: code(glu),
            out: product.out,
        };
        self.mat_mul(stream, &many)
    }
}

/// Whether token and slot do not fit into the 22 + 10 bits of a compact entry.
fn is_wide(tokens: usize, k: usize) -> bool {
    tokens > 1 << 22 || k > 1 << 10
}

/// Bytes of the bounds that lie before the list, whole times 16.
fn bounds_size(n_expert: usize) -> usize {
    (4 * (n_expert + 1)).next_multiple_of(16)
}
