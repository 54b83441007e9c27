//! Element-wise and row-wise operations.

use crate::activation::Activation;
use crate::cpu::glu::Glu;
use crate::cpu::map::Map;
use crate::cuda::launch::{GroupNorm, Multiply};
use crate::cuda::{Device, Ptr, Result, Scratch};
use crate::mirrored::Mirrored;
use crate::norm::Norm;
use crate::weights::Vector;

impl Device {
    /// `dst[i] = src[rows[i]]`.
    pub(crate) fn get_rows(
        &mut self,
        src: &mut Activation,
        rows: &[u32],
        dst: &mut Activation,
    ) -> Result<()> {
        let x = src.values.device(self.gpu())?;
        let at = self.scratch(Scratch::Rows, size_of_val(rows))?;
        self.gpu().upload(at, rows)?;
        let out = dst.values.fill_device(self.gpu())?;
        let kernels = self.kernels();
        kernels.get_rows(self.stream(), x, at, rows.len(), src.width, out)
    }

    /// RMS norm of every group of `weight.n` elements, times `weight`. If there is only one group, the result is also quantized.
    pub(crate) fn rms_norm(
        &mut self,
        src: &mut Activation,
        weight: &Vector,
        eps: f32,
        dst: &mut Activation,
    ) -> Result<()> {
        let w = self.vector(weight)?;
        let x = src.values.device(self.gpu())?;
        let out = dst.values.fill_device(self.gpu())?;
        let groups = src.values.len() / weight.n;
        let quantized = match groups {
            1 => dst.fill_quantized(self.gpu()),
            _ => Ptr::NULL,
        };
        let kernels = self.kernels();
        kernels.rms_norm(self.stream(), x, w, eps, weight.n, groups, out, quantized)
    }

    /// Quantizes `x` if it has one row, unless the kernel that computed it already did.
    pub(crate) fn quantize_row(&mut self, x: &mut Activation) -> Result<()> {
        if x.rows != 1 || x.quantized(self.gpu()) != Ptr::NULL {
            return Ok(());
        }
        let row = x.values.device(self.gpu())?;
        let quantized = x.fill_quantized(self.gpu());
        let kernels = self.kernels();
        kernels.quantize_row(self.stream(), row, x.width, quantized)
    }

    /// Multiplies every row of `x` by the sigmoid of its score, in place. `score`: `(rows, 1)`.
    pub(crate) fn scale_rows_by_sigmoid(
        &mut self,
        score: &mut Activation,
        x: &mut Activation,
    ) -> Result<()> {
        let s = score.values.device(self.gpu())?;
        let rows = x.values.update_device(self.gpu())?;
        let kernels = self.kernels();
        kernels.scale_rows_by_sigmoid(self.stream(), rows, s, x.rows, x.width)
    }

    /// `dst = a + b`.
    pub(crate) fn add(
        &mut self,
        a: &mut Activation,
        b: &mut Activation,
        dst: &mut Activation,
    ) -> Result<()> {
        let gpu = self.gpu();
        let (x, y) = (a.values.device(gpu)?, b.values.device(gpu)?);
        let out = dst.values.fill_device(gpu)?;
        self.kernels().add(self.stream(), x, y, a.values.len(), out)
    }

    /// The gated activation of `gate` and `up`, stored in `gate`.
    pub(crate) fn glu(
        &mut self,
        glu: Glu,
        gate: &mut Activation,
        up: &mut Activation,
    ) -> Result<()> {
        let b = up.values.device(self.gpu())?;
        let a = gate.values.update_device(self.gpu())?;
        self.kernels()
            .glu(self.stream(), glu, a, b, gate.values.len())
    }

    /// A norm of every group of `norm.n` elements, times its weights and plus its bias if it has them.
    pub(crate) fn group_norm(
        &mut self,
        src: &mut Activation,
        norm: &Norm,
        dst: &mut Activation,
    ) -> Result<()> {
        let width = norm.n.max(1);
        let n_weights = norm.weight.as_ref().map_or(1, |w| w.data.len() / width);
        let operands = GroupNorm {
            x: src.values.device(self.gpu())?,
            kind: norm.kind,
            weight: self.optional(norm.weight.as_ref())?,
            n_weights,
            bias: self.optional(norm.bias.as_ref())?,
            eps: norm.eps,
            width,
            groups: src.values.len() / width,
            out: dst.values.fill_device(self.gpu())?,
        };
        self.kernels().group_norm(self.stream(), &operands)
    }

    /// `x = map(x)` for each element.
    pub(crate) fn map(&mut self, map: Map, x: &mut Activation) -> Result<()> {
        let n = x.values.len();
        let x = x.values.update_device(self.gpu())?;
        self.kernels().map(self.stream(), map, x, n)
    }

    /// Multiplies each group of `factors.n` elements of `x` by the factors, in place.
    pub(crate) fn multiply(&mut self, factors: &Vector, x: &mut Activation) -> Result<()> {
        let n = factors.n.max(1);
        let at = self.vector(factors)?;
        let (rows, width) = match n {
            1 => (x.rows, x.width),
            _ => (x.values.len() / n, n),
        };
        let x = x.values.update_device(self.gpu())?;
        let operands = Multiply {
            x,
            factors: at,
            ids: Ptr::NULL,
            rows_per: 1,
            rows,
            width,
            group: width / n,
            per_row: 0,
            out: x,
        };
        self.kernels().multiply(self.stream(), &operands)
    }

    /// Multiplies each row of `x` by its factors `(row, n)`, in place: the elements of a row are divided into `n` groups.
    pub(crate) fn multiply_rows(
        &mut self,
        factors: &mut Mirrored<f32>,
        x: &mut Activation,
    ) -> Result<()> {
        let (rows, width) = (x.rows, x.width);
        let per_row = factors.len() / rows.max(1);
        let factors = factors.device(self.gpu())?;
        let x = x.values.update_device(self.gpu())?;
        let operands = Multiply {
            x,
            factors,
            ids: Ptr::NULL,
            rows_per: 1,
            rows,
            width,
            group: width / per_row.max(1),
            per_row,
            out: x,
        };
        self.kernels().multiply(self.stream(), &operands)
    }

    /// Copies the columns of `src` from `first` on to `dst`, which has the right shape.
    pub(crate) fn copy_columns(
        &mut self,
        src: &mut Activation,
        first: usize,
        dst: &mut Activation,
    ) -> Result<()> {
        let x = src.values.device(self.gpu())?;
        let out = dst.values.fill_device(self.gpu())?;
        let (rows, columns) = ((src.rows, src.width), (first, dst.width));
        let kernels = self.kernels();
        kernels.copy_columns(self.stream(), x, rows, columns, out)
    }

    /// Overwrites row `at` of `dst`.
    pub(crate) fn put_row(&mut self, dst: &mut Activation, at: usize, row: &[f32]) -> Result<()> {
        let out = dst.values.update_device(self.gpu())?;
        self.gpu().upload(out.offset(at * size_of_val(row)), row)
    }
}
