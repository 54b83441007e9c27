//! Weights on the GPU: resident matrices, and temporary copies of matrices in CPU memory.

use half::f16;
use moe_gguf::GgmlType;
use zerocopy::IntoBytes;

use super::{Device, Scratch};
use crate::cpu::quant::dequantize_row;
use crate::cuda::launch::{Kernels, Weights};
use crate::cuda::{DeviceBuffer, Error, Ptr, Result};
use crate::recorder::Routing;
use crate::weights::{Matrix, Vector};

/// Bytes after a matrix or vector that kernels may read and ignore.
pub(super) const SLACK: usize = 256;
/// Number of elements that are converted to F16 at a time.
const CONVERTED_AT_ONCE: usize = 1 << 20;

/// A matrix in GPU memory.
pub(super) struct Resident {
    buffer: DeviceBuffer,
    ty: GgmlType,
    row_size: usize,
}

impl Device {
    /// Whether a matrix is resident on this GPU. It is copied at the first call. If it does not fit, it stays in CPU memory, and
    /// [`Device::fallbacks`] lists it.
    pub(crate) fn holds(&mut self, matrix: &Matrix) -> bool {
        self.resident(matrix).is_some()
    }

    /// The matrix on the GPU. Its tensor is copied at the first call. `None` if it does not fit.
    pub(crate) fn matrix(&mut self, matrix: &Matrix) -> Option<Weights> {
        let index = matrix.place.tensor_idx;
        if !self.matrices.contains_key(&index) {
            let resident = match self.upload(matrix) {
                Ok(resident) => Some(resident),
                Err(error) => {
                    self.fallbacks.tensors.push(matrix.place.name.clone());
                    self.fallbacks.note(&error);
                    None
                }
            };
            self.matrices.insert(index, resident);
        }
        let resident = self.matrices[&index].as_ref()?;
        let (ty, row_size) = (resident.ty, resident.row_size);
        let first = resident.buffer.ptr().offset(matrix.first * row_size);
        Some(Weights {
            expert_size: matrix.stride * row_size,
            ..weights(matrix, first, ty, row_size)
        })
    }

    /// The resident matrix, or a copy for one product.
    ///
    /// # Errors
    /// The copy does not fit or cannot be started.
    pub(crate) fn matrix_or_copy(&mut self, matrix: &Matrix) -> Result<Weights> {
        match self.resident(matrix) {
            Some(weights) => Ok(weights),
            None => {
                let all: Vec<i32> = (0..).take(matrix.n_expert).collect();
                self.fetch(matrix, &all, Scratch::Gate)
            }
        }
    }

    /// Copies the tensor of a matrix.
    fn upload(&self, matrix: &Matrix) -> Result<Resident> {
        let bytes = matrix.tensor();
        let rows = bytes.len() / matrix.row_size;
        if Kernels::supports(matrix.ty) {
            let buffer = self.gpu.alloc(bytes.len() + SLACK)?;
            self.gpu.upload(buffer.ptr(), bytes)?;
            return Ok(Resident {
                buffer,
                ty: matrix.ty,
                row_size: matrix.row_size,
            });
        }
        // A type without GPU kernels is converted to F16.
        let row_size = matrix.n_in * size_of::<f16>();
        let buffer = self.gpu.alloc(rows * row_size + SLACK)?;
        let at_once = (CONVERTED_AT_ONCE / matrix.n_in).max(1);
        let (mut values, mut halves) = (vec![0.0; matrix.n_in], Vec::new());
        for (i, chunk) in bytes.chunks(at_once * matrix.row_size).enumerate() {
            halves.clear();
            for row in chunk.chunks_exact(matrix.row_size) {
                dequantize_row(matrix.ty, row, &mut values)
                    .expect("a matrix has a CPU kernel, so its type can be dequantized");
                halves.extend(values.iter().map(|&v| f16::from_f32(v).to_bits()));
            }
            let at = buffer.ptr().offset(i * at_once * row_size);
            self.gpu.upload(at, halves.as_bytes())?;
        }
        Ok(Resident {
            buffer,
            ty: GgmlType::F16,
            row_size,
        })
    }

    /// Copies the experts `ids` of a matrix in CPU memory into `scratch`, at the same offsets as in the matrix. Experts of the hot
    /// cache are copied within the GPU.
    ///
    /// # Errors
    /// The type has no kernel, or the copies do not fit or cannot be started.
    fn fetch(&mut self, matrix: &Matrix, ids: &[i32], scratch: Scratch) -> Result<Weights> {
        if !Kernels::supports(matrix.ty) {
            return Err(Error::Unsupported {
                kernel: "mul_mat",
                what: format!("type {}", matrix.ty.name()),
            });
        }
        let expert_size = matrix.expert_bytes();
        let room = self.scratch(scratch, expert_size * matrix.n_expert + SLACK)?;
        let mut wanted = vec![false; matrix.n_expert];
        ids.iter().for_each(|&id| wanted[id as usize] = true);
        for (expert, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
            let at = room.offset(expert * expert_size);
            match self.hot_matrix(matrix, expert) {
                Some(hot) => self.gpu.copy(hot, at, expert_size)?,
                None => self.gpu.upload(at, matrix.expert(expert))?,
            }
        }
        Ok(weights(matrix, room, matrix.ty, matrix.row_size))
    }

    /// The matrices of the selected experts on the GPU: the resident ones, or copies in `scratch`. Copies omit the first `slot`
    /// entries of `routing.ids` and require the ids in CPU memory.
    ///
    /// # Errors
    /// The type has no kernel, or the copies do not fit or cannot be started.
    pub(crate) fn experts(
        &mut self,
        matrix: &Matrix,
        routing: &Routing,
        slot: usize,
        scratch: Scratch,
    ) -> Result<Weights> {
        match self.resident(matrix) {
            Some(weights) => Ok(weights),
            None => self.fetch(matrix, &routing.ids.host()[slot..], scratch),
        }
    }

    /// The matrix, if it is resident on this GPU: by its placement, or because the hot cache contains all its experts.
    pub(crate) fn resident(&mut self, matrix: &Matrix) -> Option<Weights> {
        if let Some(hot) = self.complete_hot(matrix) {
            return Some(hot);
        }
        if self.placement.tensor(&matrix.place) == self.id() {
            self.matrix(matrix)
        } else {
            None
        }
    }

    /// The vector on the GPU, copied at the first call.
    ///
    /// # Errors
    /// It does not fit, or the copy cannot be started.
    pub(crate) fn vector(&mut self, vector: &Vector) -> Result<Ptr> {
        let index = vector.place.tensor_idx;
        if let Some(buffer) = self.vectors.get(&index) {
            return Ok(buffer.ptr());
        }
        let buffer = self
            .gpu
            .alloc(size_of_val(vector.data.as_slice()) + SLACK)?;
        self.gpu.upload(buffer.ptr(), vector.data.as_slice())?;
        Ok(self.vectors.entry(index).or_insert(buffer).ptr())
    }

    /// An optional vector; [`Ptr::NULL`] if it does not exist.
    ///
    /// # Errors
    /// As [`Device::vector`].
    pub(crate) fn optional(&mut self, vector: Option<&Vector>) -> Result<Ptr> {
        vector.map_or(Ok(Ptr::NULL), |vector| self.vector(vector))
    }
}

/// Describes a copy of the matrices at `ptr`, one after the other, with rows of type `ty`.
pub(super) fn weights(matrix: &Matrix, ptr: Ptr, ty: GgmlType, row_size: usize) -> Weights {
    Weights {
        ptr,
        ty,
        n_in: matrix.n_in,
        n_out: matrix.n_out,
        row_size,
        expert_size: row_size * matrix.n_out,
    }
}
