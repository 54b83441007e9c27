//! Reading the tensors of a model file as weights.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::path::PathBuf;

use moe_gguf::{Gguf, LayerId, Tensor};

use super::{Linear, Matrix, Place, Vector, layer_of};
use crate::adapter::Adapters;
use crate::cpu::quant::{Kernel, dequantize_row};
use crate::error::{Error, Result};

/// Whether a linear layer has a bias.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bias {
    /// A bias in the file is an error.
    None,
    /// The bias is used if the file has it.
    Optional,
    /// A file without the bias is an error.
    Required,
}

/// Finds the tensors of a model and checks their shapes.
pub(crate) struct Loader<'g> {
    pub gguf: &'g Gguf,
    pub arch: String,
    /// Indices of the tensors that were requested.
    used: RefCell<HashSet<u32>>,
    /// Bytes of the vectors that were converted to f32.
    converted_bytes: Cell<u64>,
    /// Adapters whose matrices are added to those of the model.
    pub adapters: Adapters<'g>,
}

impl<'g> Loader<'g> {
    pub(crate) fn new(gguf: &'g Gguf, arch: &str) -> Loader<'g> {
        Loader {
            gguf,
            arch: arch.to_owned(),
            used: RefCell::default(),
            converted_bytes: Cell::new(0),
            adapters: Adapters::default(),
        }
    }

    /// The same loader with adapters.
    pub(crate) fn with_adapters(self, adapters: Adapters<'g>) -> Loader<'g> {
        Loader { adapters, ..self }
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.gguf.files()[0].path.clone()
    }

    /// Checks that every tensor of the file was requested. Ignoring a tensor would change the results.
    pub(crate) fn check_all_used(&self) -> Result<()> {
        let used = self.used.borrow();
        let unused = |t: &&Tensor| !used.contains(&t.index);
        match self.gguf.tensors().iter().find(unused) {
            Some(tensor) => Err(Error::UnknownTensor {
                file: self.file(),
                tensor: tensor.name.clone(),
                arch: self.arch.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Bytes of the f32 vectors so far.
    pub(crate) fn converted_bytes(&self) -> u64 {
        self.converted_bytes.get()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// Checks that no tensor belongs to a layer at or beyond `n_layer`: such layers would be ignored silently.
    pub(crate) fn refuse_extra_layers(&self, n_layer: usize) -> Result<()> {
        let used = self.used.borrow();
        let extra = |t: &&Tensor| {
            !used.contains(&t.index) && layer_of(&t.name).is_some_and(|l| l.index() >= n_layer)
        };
        match self.gguf.tensors().iter().find(extra) {
            Some(tensor) => Err(Error::ExtraLayer {
                file: self.file(),
                tensor: tensor.name.clone(),
                n_layer,
            }),
            None => Ok(()),
        }
    }

    /// Checks that the file has a tensor.
    pub(crate) fn require(&self, name: &str) -> Result<()> {
        if self.has(name) {
            Ok(())
        } else {
            Err(self.missing(name))
        }
    }

    fn missing(&self, name: &str) -> Error {
        Error::MissingTensor {
            file: self.file(),
            tensor: name.into(),
            arch: self.arch.clone(),
        }
    }

    /// Marks a tensor as used, if the file has it: llama.cpp accepts it and does not read it.
    pub(crate) fn omit(&self, name: &str) {
        if let Some(tensor) = self.gguf.tensor(name) {
            self.used.borrow_mut().insert(tensor.index);
        }
    }

    /// Number of layers before the first one with the tensor `blk.N.part`.
    pub(crate) fn n_without(&self, part: &str) -> usize {
        let layer = |t: &Tensor| {
            let layer = layer_of(&t.name)?;
            let is_part = t.name == format!("blk.{layer}.{part}");
            is_part.then_some(layer.index())
        };
        let layers = self.gguf.tensors().iter().filter_map(layer);
        layers.min().unwrap_or(0)
    }

    /// Whether the routers have a bias for the selection. `n_dense` layers without a router come first.
    pub(crate) fn has_selection_bias(&self, n_dense: usize) -> bool {
        self.has(&format!("blk.{n_dense}.exp_probs_b.bias"))
    }

    /// Omits the blocks of an MTP head, the layers from `n_layer` to `n_block - 1`, as llama.cpp does.
    pub(crate) fn omit_mtp(&self, n_layer: usize, n_block: usize) {
        let is_mtp = |t: &&Tensor| {
            let layer = layer_of(&t.name).map(LayerId::index);
            layer.is_some_and(|layer| (n_layer..n_block).contains(&layer))
        };
        let mtp = self.gguf.tensors().iter().filter(is_mtp);
        self.used
            .borrow_mut()
            .extend(mtp.map(|tensor| tensor.index));
    }

    fn tensor(&self, name: &str, expected: &[usize]) -> Result<&'g Tensor> {
        let tensor = self.gguf.tensor(name);
        let tensor = tensor.ok_or_else(|| self.missing(name))?;
        self.used.borrow_mut().insert(tensor.index);
        let mut want = [1u64; 4];
        for (w, &e) in want.iter_mut().zip(expected) {
            *w = e as u64;
        }
        if tensor.ne != want {
            return Err(Error::Shape {
                file: self.file(),
                tensor: name.into(),
                found: tensor.ne.to_vec(),
                expected: want.to_vec(),
            });
        }
        Ok(tensor)
    }

    fn kernel_error(&self, name: &str, source: crate::cpu::quant::Error) -> Error {
        Error::Kernel {
            file: self.file(),
            tensor: name.into(),
            source,
        }
    }

    /// A matrix of `ne = [n_in, n_out]`.
    pub(crate) fn matrix(&self, name: &str, n_in: usize, n_out: usize) -> Result<Matrix<'g>> {
        self.stack(name, n_in, n_out, 1)
    }

    /// A stack of expert matrices of `ne = [n_in, n_out, n_expert]`.
    pub(crate) fn stack(
        &self,
        name: &str,
        n_in: usize,
        n_out: usize,
        n_expert: usize,
    ) -> Result<Matrix<'g>> {
        let tensor = self.tensor(name, &[n_in, n_out, n_expert])?;
        let kernel = Kernel::for_type(tensor.ty).map_err(|e| self.kernel_error(name, e))?;
        let data = self.gguf.data(tensor)?;
        let matrix = Matrix::new(Place::of(tensor), kernel, [n_in, n_out, n_expert], data);
        Ok(Matrix {
            low_rank: self.adapters.low_rank(name, [n_in, n_out, n_expert])?,
            ..matrix
        })
    }

    /// Two stacks of expert matrices in one tensor of `ne = [n_in, 2 * n_out, n_expert]`: the first and the last `n_out` rows of each
    /// expert.
    pub(crate) fn halves(
        &self,
        name: &str,
        n_in: usize,
        n_out: usize,
        n_expert: usize,
    ) -> Result<[Matrix<'g>; 2]> {
        let half = |first: usize| -> Result<Matrix<'g>> {
            let both = self.stack(name, n_in, 2 * n_out, n_expert)?;
            Ok(both.part(first, n_out))
        };
        Ok([half(0)?, half(n_out)?])
    }

    /// The matrices `part.weight` of `ne = [n_in, n_out, n_expert]`, and `part.bias`.
    pub(crate) fn linear(
        &self,
        part: &str,
        [n_in, n_out, n_expert]: [usize; 3],
        bias: Bias,
    ) -> Result<Linear<'g>> {
        let weights = self.stack(&format!("{part}.weight"), n_in, n_out, n_expert)?;
        let name = format!("{part}.bias");
        let has_bias = match bias {
            Bias::None => false,
            Bias::Optional => self.has(&name),
            Bias::Required => true,
        };
        let bias = has_bias.then(|| self.vectors(&name, n_out, n_expert));
        Ok(Linear {
            weights,
            bias: bias.transpose()?,
        })
    }

    /// A vector of `ne = [n]`, converted to f32.
    pub(crate) fn vector(&self, name: &str, n: usize) -> Result<Vector> {
        self.vectors(name, n, 1)
    }

    /// The kernels of a convolution, `ne = [n, channels]`, converted to f32 and transposed: `(n, channels)`.
    pub(crate) fn kernels(&self, name: &str, n: usize, channels: usize) -> Result<Vector> {
        self.kernels_of(name, &[n, channels], [n, channels])
    }

    /// Like [`Loader::kernels`], of `ne = [n, 1, channels]`.
    pub(crate) fn kernel_planes(&self, name: &str, n: usize, channels: usize) -> Result<Vector> {
        self.kernels_of(name, &[n, 1, channels], [n, channels])
    }

    fn kernels_of(&self, name: &str, shape: &[usize], [n, channels]: [usize; 2]) -> Result<Vector> {
        let kernels = self.converted(self.tensor(name, shape)?, n, channels)?;
        let element = |at: usize| kernels.data[at % channels * n + at / channels];
        let data = (0..n * channels).map(element).collect();
        Ok(Vector {
            place: kernels.place,
            data,
            n: channels,
        })
    }

    /// One vector per expert, `ne = [n, n_expert]`, converted to f32.
    pub(crate) fn vectors(&self, name: &str, n: usize, n_expert: usize) -> Result<Vector> {
        self.converted(self.tensor(name, &[n, n_expert])?, n, n_expert)
    }

    /// The `n_rows` vectors of a tensor, `n` elements each, converted to f32.
    fn converted(&self, tensor: &Tensor, n: usize, n_rows: usize) -> Result<Vector> {
        let bytes = self.gguf.data(tensor)?;
        let mut data = vec![0.0; n * n_rows];
        let converted = self.converted_bytes.get() + size_of_val(data.as_slice()) as u64;
        self.converted_bytes.set(converted);
        let row_size = bytes.len() / n_rows;
        for (row, out) in bytes.chunks_exact(row_size).zip(data.chunks_exact_mut(n)) {
            let result = dequantize_row(tensor.ty, row, out);
            result.map_err(|e| self.kernel_error(&tensor.name, e))?;
        }
        Ok(Vector {
            place: Place::of(tensor),
            data,
            n,
        })
    }
}
