//! Element-wise and row-wise operations.

use crate::activation::Activation;
use crate::cpu::glu::Glu;
use crate::cuda::{Device, Ptr, Result, Scratch};
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

    /// Overwrites row `at` of `dst`.
    pub(crate) fn put_row(&mut self, dst: &mut Activation, at: usize, row: &[f32]) -> Result<()> {
        let out = dst.values.update_device(self.gpu())?;
        self.gpu().upload(out.offset(at * size_of_val(row)), row)
    }
}
