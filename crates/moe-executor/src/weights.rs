//! Weights of a model: quantized matrices borrowed from the mapped file, and vectors converted to f32.

mod loader;

use moe_gguf::{GgmlType, LayerId, Tensor};

use crate::cpu::quant::Kernel;

pub(crate) use loader::{Bias, Loader};

/// The location of a tensor in the model's files, as trace records contain it.
#[derive(Debug, Clone)]
pub struct Place {
    /// Tensor name.
    pub name: String,
    /// Index in the GGUF tensor table.
    pub tensor_idx: u32,
    /// Shard, 0 = first file.
    pub file: u16,
    /// Layer in the tensor's name.
    pub layer: Option<LayerId>,
    /// Absolute offset in the file, bytes.
    pub offset: u64,
    /// Size of the complete tensor, bytes.
    pub size_bytes: u64,
    /// Elements in each dimension of the complete tensor.
    pub ne: [u64; 4],
    /// Element type in the file.
    pub ty: GgmlType,
}

impl Place {
    pub(crate) fn of(tensor: &Tensor) -> Place {
        Place {
            name: tensor.name.clone(),
            tensor_idx: tensor.index,
            file: tensor.file,
            layer: layer_of(&tensor.name),
            offset: tensor.offset,
            size_bytes: tensor.size_bytes,
            ne: tensor.ne,
            ty: tensor.ty,
        }
    }
}

/// The layer `N` of a name `blk.N.…`.
fn layer_of(name: &str) -> Option<LayerId> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// A matrix, or a stack with one matrix per expert, in the quantization of the file. `ne = [n_in, n_out, n_expert]`.
pub struct Matrix<'g> {
    /// Location in the file.
    pub place: Place,
    /// Type of its blocks.
    pub ty: GgmlType,
    /// Matrix products for its type.
    pub kernel: Kernel,
    /// Length of a row, elements.
    pub n_in: usize,
    /// Rows of one matrix.
    pub n_out: usize,
    /// Matrices in the stack, 1 for a plain matrix.
    pub n_expert: usize,
    /// Bytes of a row.
    pub row_size: usize,
    /// Rows between the starts of two matrices: `n_out`, or more if the tensor also contains another projection of each expert.
    pub stride: usize,
    /// Row of the tensor at which the first matrix starts.
    pub first: usize,
    /// Bytes of the tensor.
    data: &'g [u8],
    /// Products of adapters that are added to its products, in the order of the adapters.
    pub low_rank: Vec<LowRank<'g>>,
}

/// The index of a tensor in the GGUF tensor table, and a row of the tensor.
pub(crate) type MatrixKey = (u32, usize);

/// The pair of matrices of a LoRA adapter for a matrix of the model. To a product of `x`, it adds `scale · (b · (a · x))`.
pub struct LowRank<'g> {
    /// `ne = [n_in, rank, n_expert]`
    pub a: Matrix<'g>,
    /// `ne = [rank, n_out, n_expert]`
    pub b: Matrix<'g>,
    /// Factor of the product.
    pub scale: f32,
}

/// Matrices of one type and shape in CPU memory.
#[derive(Clone, Copy)]
pub struct Stack<'a> {
    /// Matrix products for their type.
    pub kernel: Kernel,
    /// Length of a row, elements.
    pub n_in: usize,
    /// Rows of one matrix.
    pub n_out: usize,
    /// Bytes of a row.
    pub row_size: usize,
    /// Rows between the starts of two matrices.
    stride: usize,
    /// Row at which the first matrix starts.
    first: usize,
    data: &'a [u8],
}

impl<'a> Stack<'a> {
    /// The bytes of rows `rows` of a matrix.
    pub fn rows(&self, matrix: usize, rows: std::ops::Range<usize>) -> &'a [u8] {
        let first = self.first + matrix * self.stride;
        &self.data[(first + rows.start) * self.row_size..(first + rows.end) * self.row_size]
    }
}

impl<'g> Matrix<'g> {
    /// Matrices of `ne = [n_in, n_out, n_expert]` with the bytes `data`, without adapters. No number of `ne` is 0.
    pub(crate) fn new(
        place: Place,
        kernel: Kernel,
        [n_in, n_out, n_expert]: [usize; 3],
        data: &'g [u8],
    ) -> Matrix<'g> {
        Matrix {
            ty: place.ty,
            place,
            kernel,
            n_in,
            n_out,
            n_expert,
            row_size: data.len() / (n_out * n_expert),
            stride: n_out,
            first: 0,
            data,
            low_rank: Vec::new(),
        }
    }

    /// The `n_out` rows of each matrix that start at row `first`.
    fn part(self, first: usize, n_out: usize) -> Matrix<'g> {
        let low_rank = self.low_rank.into_iter().map(|pair| LowRank {
            a: pair.a,
            b: pair.b.part(first, n_out),
            scale: pair.scale,
        });
        Matrix {
            n_out,
            first: self.first + first,
            low_rank: low_rank.collect(),
            ..self
        }
    }

    /// Whether adapters add products to its products.
    pub fn is_adapted(&self) -> bool {
        !self.low_rank.is_empty()
    }

    /// The bytes of rows `rows` of matrix `expert`.
    pub fn rows(&self, expert: usize, rows: std::ops::Range<usize>) -> &'g [u8] {
        self.stack().rows(expert, rows)
    }

    /// The bytes of the matrix of an expert.
    pub fn expert(&self, expert: usize) -> &'g [u8] {
        self.rows(expert, 0..self.n_out)
    }

    /// Bytes of the matrix of one expert.
    pub fn expert_bytes(&self) -> usize {
        self.n_out * self.row_size
    }

    /// Its matrices without their location in the file.
    pub fn stack(&self) -> Stack<'g> {
        Stack {
            stride: self.stride,
            first: self.first,
            ..self.stack_of(self.data)
        }
    }

    /// Matrices of the same type and shape whose bytes are `data`, one after the other.
    pub fn stack_of<'a>(&self, data: &'a [u8]) -> Stack<'a> {
        Stack {
            kernel: self.kernel,
            n_in: self.n_in,
            n_out: self.n_out,
            row_size: self.row_size,
            stride: self.n_out,
            first: 0,
            data,
        }
    }

    /// Whether both are parts of the same tensor.
    pub fn shares_tensor(&self, other: &Matrix) -> bool {
        self.place.tensor_idx == other.place.tensor_idx
    }

    /// The tensor, and the row at which the first matrix starts: different matrices have different keys.
    pub fn key(&self) -> MatrixKey {
        (self.place.tensor_idx, self.first)
    }

    /// The bytes of the tensor. If [`Matrix::stride`] is `n_out`, they are those of all matrices.
    pub fn tensor(&self) -> &'g [u8] {
        self.data
    }

    /// Address of the first byte, for the trace.
    pub fn address(&self) -> u64 {
        self.data[self.first * self.row_size..].as_ptr() as u64
    }
}

/// A vector, or a stack with one vector per expert, in f32 `(n_expert, n)`.
pub struct Vector {
    /// Location in the file.
    pub place: Place,
    /// Values.
    pub data: Vec<f32>,
    /// Length of one vector.
    pub n: usize,
}

impl Vector {
    /// The vector of an expert.
    pub fn expert(&self, expert: usize) -> &[f32] {
        &self.data[expert * self.n..][..self.n]
    }
}

#[cfg(test)]
impl Vector {
    /// Vectors of `n` elements that are in no file.
    pub(crate) fn of_values(data: Vec<f32>, n: usize) -> Vector {
        Vector {
            place: Place {
                name: String::new(),
                tensor_idx: 0,
                file: 0,
                layer: None,
                offset: 0,
                size_bytes: 0,
                ne: [1; 4],
                ty: GgmlType::F32,
            },
            data,
            n,
        }
    }
}

/// A linear layer, or one per expert: a matrix, and the bias of its output if the architecture has one.
pub struct Linear<'g> {
    /// `ne = [n_in, n_out, n_expert]`
    pub weights: Matrix<'g>,
    /// `ne = [n_out, n_expert]`
    pub bias: Option<Vector>,
}

impl Linear<'_> {
    /// Operations of the layer: the product, and the addition of the bias.
    pub(crate) fn ops(&self) -> usize {
        1 + usize::from(self.bias.is_some())
    }
}
