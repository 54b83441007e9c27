//! Products of the selected experts, and the weighted sum of their results.
//!
//! Entry `token * k + slot` is one selected expert of one token. Few entries are computed as one matrix-vector product each. Many
//! entries are sorted by expert on the GPU and computed by one grouped product.

use cudarc::driver::CudaStream;
use moe_gguf::GgmlType;

use super::mat_mul::{Grouped, Many};
use super::products::{One, code, ends_products};
use super::{Kernels, Rows, Weights, grid};
use crate::cpu::glu::Glu;
use crate::cuda::kernel::kernels;
use crate::cuda::module::args;
use crate::cuda::{Ptr, Result};

kernels! {
    GROUP_ENTRIES = "group_entries" => (ids: Ptr, n: U32, k: U32, wide: Bool, bounds: Ptr, list: Ptr);
    QUANTIZE = "quantize" => (x: Ptr, n: U64, codes: Ptr, groups: Ptr);
    CONVERT_F16 = "convert_f16", CONVERT_BF16 = "convert_bf16" => (x: Ptr, n: U64, to: Ptr);
    FIND_SLOTS = "find_slots" => (
        ids: Ptr, table: Ptr, k: U32, dummy: U32, number: U32, slots: Ptr, mail: Ptr, mailed: Ptr, go: Ptr,
    );
    MERGE = "merge" => (experts: Ptr, weights: Ptr, k: U32, width: U32, n: U64, out: Ptr);
    SQUARED_RELU = "squared_relu" => (x: Ptr, n: U64);
}

/// `out[entry] = weights[expert of entry] · x[entry / rows_per] + bias[expert of entry]`.
#[derive(Clone, Copy, Debug)]
pub struct MulMatId {
    /// One matrix per expert.
    pub weights: Weights,
    /// f32 `(n_expert, n_out)`, or null.
    pub bias: Ptr,
    /// `(tokens * k / rows_per, n_in)`. May be quantized if there is only one row.
    pub x: Rows,
    /// Number of entries that read the same row of `x`: `k` if `x` has one row per token, 1 if it has one row per entry.
    pub rows_per: usize,
    /// i32 `(tokens, k)`, each less than `n_expert`.
    pub ids: Ptr,
    /// Number of tokens.
    pub tokens: usize,
    /// Selected experts per token.
    pub k: usize,
    /// Number of experts of the layer.
    pub n_expert: usize,
    /// f32 `(tokens, k, n_out)`.
    pub out: Ptr,
    /// [`Kernels::converted_size`] bytes.
    pub scratch: Ptr,
    /// [`Kernels::work_size`] bytes.
    pub work: Ptr,
}

/// `out[entry] = glu(gate · x[token] + gate_bias, up · x[token] + up_bias)`, all of the entry's expert.
#[derive(Clone, Copy, Debug)]
pub struct GateUp {
    /// One matrix per expert.
    pub gate: Weights,
    /// One matrix per expert, of the same shape as `gate`.
    pub up: Weights,
    /// f32 `(n_expert, n_ff)`, or null.
    pub gate_bias: Ptr,
    /// f32 `(n_expert, n_ff)`, or null.
    pub up_bias: Ptr,
    /// The activation.
    pub glu: Glu,
    /// `(tokens, n_in)`. May be quantized if there is only one token.
    pub x: Rows,
    /// i32 `(tokens, k)`, each less than `n_expert`.
    pub ids: Ptr,
    /// Number of tokens.
    pub tokens: usize,
    /// Selected experts per token.
    pub k: usize,
    /// Number of experts of the layer.
    pub n_expert: usize,
    /// f32 `(tokens, k, n_ff)`.
    pub out: Ptr,
    /// f32 `(tokens, k, n_ff)`: memory for the products with `up`, or null if [`ends_products`].
    pub up_out: Ptr,
    /// Destination of the quantized results, [`Kernels::scratch_size`] bytes for `k` rows of `n_ff`, or null. It is only written
    /// for one token, if `n_ff` is a multiple of 32.
    pub quantized: Ptr,
    /// [`Kernels::converted_size`] bytes.
    pub scratch: Ptr,
    /// [`Kernels::work_size`] bytes.
    pub work: Ptr,
}

/// As [`MulMatId`], for matrices at arbitrary addresses.
#[derive(Clone, Copy, Debug)]
pub struct Fetched {
    /// u64 `(entries)`: address of the matrix of each entry. Entries with address 0 are skipped, and their rows of `out` are not
    /// written.
    pub table: Ptr,
    /// Type of the weights.
    pub ty: GgmlType,
    /// Elements per row.
    pub n_in: usize,
    /// Rows per matrix.
    pub n_out: usize,
    /// Size of a row in bytes.
    pub row_size: usize,
    /// f32 `(n_expert, n_out)`, or null.
    pub bias: Ptr,
    /// f32 `(entries / rows_per, n_in)`.
    pub x: Ptr,
    /// Number of entries that read the same row of `x`.
    pub rows_per: usize,
    /// i32 `(entries)`. Only the bias depends on it.
    pub ids: Ptr,
    /// Number of entries.
    pub entries: usize,
    /// f32 `(entries, n_out)`.
    pub out: Ptr,
}

/// Threads per block.
const THREADS: usize = 256;

/// The selected experts of some tokens.
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

    /// Whether each entry is computed on its own, because experts have about one entry each.
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
    fn selection(&self) -> Selection {
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

    /// The same product with one matrix-vector product per entry, after [`Kernels::quantize_rows`].
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
    /// The product with either matrix.
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

/// A search for the slots of the experts of one token.
#[derive(Clone, Copy, Debug)]
pub struct FindSlots {
    /// i32 `(k)`: selected experts.
    pub ids: Ptr,
    /// i32 `(n_expert)`: slot of each expert, or -1.
    pub table: Ptr,
    /// Number of selected experts.
    pub k: usize,
    /// Slot of experts that have none.
    pub dummy: usize,
    /// Number of the search, for `mailed` and `go`.
    pub number: u32,
    /// i32 `(k)`: slot of each selected expert.
    pub slots: Ptr,
    /// u32 `(1 + k)` in memory that the CPU reads: number of experts without a slot, and the selected experts.
    pub mail: Ptr,
    /// u32 in memory that the CPU reads: `number` when `mail` is complete.
    pub mailed: Ptr,
    /// u32 in memory that the CPU writes: `number` if all experts have slots.
    pub go: Ptr,
}

impl Kernels {
    /// Size in bytes of the memory for sorting entries by expert.
    pub fn work_size(tokens: usize, k: usize, n_expert: usize) -> usize {
        let code = if is_wide(tokens, k) { 8 } else { 4 };
        bounds_size(n_expert) + tokens * k * code
    }

    /// The product of every entry with the matrix of its expert.
    ///
    /// # Errors
    /// No kernel [supports](Kernels::supports) the type, or a driver error.
    pub fn mul_mat_id(&self, stream: &CudaStream, product: &MulMatId) -> Result<()> {
        self.group_entries(stream, &product.selection())?;
        self.quantize_rows(stream, product)?;
        self.multiply_by_id(stream, product, None)
    }

    /// Gate, up and their activation for every entry. One kernel computes them if entries are few and gate and up have the same
    /// type. Returns whether the results are also stored in `quantized`.
    ///
    /// The kernel may read a quantized `x` before the previous kernel on the stream ends. So that kernel must not have computed
    /// it, unless [`Launches::follow_copy`] was called after it.
    ///
    /// [`Launches::follow_copy`]: crate::cuda::launches::Launches::follow_copy
    ///
    /// # Errors
    /// No kernel [supports](Kernels::supports) a type, or a driver error.
    pub fn experts_gate_up(&self, stream: &CudaStream, product: &GateUp) -> Result<bool> {
        let gate = product.half(product.gate, product.gate_bias);
        let up = product.half(product.up, product.up_bias);
        let selection = gate.selection();
        let same_layout =
            gate.weights.ty == up.weights.ty && gate.weights.expert_size == up.weights.expert_size;
        if product.tokens == 1
            && same_layout
            && let Some(is_quantized) = self.token_gate_up(stream, product)?
        {
            return Ok(is_quantized);
        }
        if selection.is_sparse() && same_layout {
            self.quantize_rows(stream, &gate)?;
            let both = One {
                up: up.weights.ptr,
                up_bias: up.bias,
                ..gate.one(Some(product.glu))
            };
            self.mat_vec(stream, &both)?;
            return Ok(false);
        }
        // Gate first; the kernel of the up product then applies the activation if it can.
        self.group_entries(stream, &selection)?;
        self.quantize_rows(stream, &gate)?;
        self.multiply_by_id(stream, &gate, None)?;
        if !gate.weights.is_quantized() {
            self.quantize_rows(stream, &up)?;
        }
        if ends_products(product.glu) {
            self.multiply_by_id(stream, &up, Some(product.glu))?;
            return Ok(false);
        }
        let up = MulMatId {
            out: product.up_out,
            ..up
        };
        self.multiply_by_id(stream, &up, None)?;
        let n = selection.entries() * up.weights.n_out;
        self.glu(stream, product.glu, product.out, product.up_out, n)?;
        Ok(false)
    }

    /// Quantizes a row of `n` activations into [`Kernels::scratch_size`] bytes at `to`, unless `to` is null. `n` is a multiple of
    /// 32. The next kernel starts after it, because some kernels read a quantized row early.
    ///
    /// # Errors
    /// A driver error.
    pub fn quantize_row(&self, stream: &CudaStream, x: Ptr, n: usize, to: Ptr) -> Result<()> {
        if to == Ptr::NULL {
            return Ok(());
        }
        self.start_quantize(stream, x, n, to)?;
        self.launches().follow_copy();
        Ok(())
    }

    /// Quantizes `n` activations; `n` is a multiple of 32.
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

    /// The product of every entry with the matrix at its own address.
    ///
    /// # Errors
    /// No kernel [supports](Kernels::supports) the type, or a driver error.
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

    /// `out[token] = Σ experts[token, slot] · weights[token, slot]`, summed in the order of the slots. `experts`: `(tokens, k,
    /// width)`, `weights`: `(tokens, k)`, or null for a sum without weights, `out`: `(tokens, width)`.
    ///
    /// # Errors
    /// A driver error.
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

    /// Finds the slots of the experts of one token.
    ///
    /// # Errors
    /// A driver error.
    pub fn find_slots(&self, stream: &CudaStream, it: &FindSlots) -> Result<()> {
        let args = args![
            it.ids, it.table, it.k, it.dummy, it.number, it.slots, it.mail, it.mailed, it.go,
        ];
        self.experts.launch(stream, FIND_SLOTS, grid(1, 32), &args)
    }

    /// Sorts the entries by expert into the `work` memory, unless each is computed on its own.
    fn group_entries(&self, stream: &CudaStream, selection: &Selection) -> Result<()> {
        if selection.is_sparse() {
            return Ok(());
        }
        let grouped = selection.grouped(1);
        let args = args![
            selection.ids,
            grouped.entries,
            selection.k,
            grouped.wide,
            grouped.bounds,
            grouped.list,
        ];
        let grid = grid(selection.n_expert, THREADS);
        self.experts.launch(stream, GROUP_ENTRIES, grid, &args)
    }

    /// Quantizes the activations of a product with several tokens. With one token, the product kernel quantizes them.
    fn quantize_rows(&self, stream: &CudaStream, product: &MulMatId) -> Result<()> {
        if product.tokens == 1 {
            return Ok(());
        }
        let n = product.rows() * product.weights.n_in;
        self.quantize(stream, &product.weights, product.x.x, n, product.scratch)
    }

    /// The product, after [`Kernels::group_entries`] and [`Kernels::quantize_rows`].
    fn multiply_by_id(
        &self,
        stream: &CudaStream,
        product: &MulMatId,
        glu: Option<Glu>,
    ) -> Result<()> {
        let selection = product.selection();
        if selection.is_sparse() {
            return self.mat_vec(stream, &product.one(glu));
        }
        let many = Many {
            weights: &product.weights,
            bias: product.bias,
            x: product.x.x,
            rows: product.rows(),
            scratch: product.scratch,
            grouped: selection.grouped(product.rows_per),
            glu: code(glu),
            out: product.out,
        };
        self.mat_mul(stream, &many)
    }

    /// `x = max(x, 0)²` with `n` elements: the activation of experts without a gate.
    pub fn squared_relu(&self, stream: &CudaStream, x: Ptr, n: usize) -> Result<()> {
        let grid = grid(n.div_ceil(256), 256);
        self.experts
            .launch(stream, SQUARED_RELU, grid, &args![x, n])
    }
}

/// Whether token and slot do not fit into the 22 and 10 bits of a 32-bit entry.
fn is_wide(tokens: usize, k: usize) -> bool {
    tokens > 1 << 22 || k > 1 << 10
}

/// Size in bytes of the bounds of the experts, which precede the list of entries; a multiple of 16.
fn bounds_size(n_expert: usize) -> usize {
    (4 * (n_expert + 1)).next_multiple_of(16)
}
