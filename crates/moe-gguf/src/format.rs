//! Constants and functions of the GGUF format for readers and writers.

use crate::error::Fault;
use crate::types::GgmlType;

/// Alignment in bytes of a file without `general.alignment`.
pub const DEFAULT_ALIGNMENT: u32 = 32;

/// Maximum number of dimensions of a tensor.
pub const MAX_DIMS: u32 = 4;

/// Maximum length of a tensor name in bytes: ggml stores it in 64 bytes with a terminating zero (`GGML_MAX_NAME`).
pub const MAX_NAME: u64 = 63;

/// Maximum number of elements, or of bytes, of a tensor: ggml counts both in signed 64-bit integers.
pub const MAX_I64: u64 = i64::MAX as u64;

/// Returns the size of a tensor in bytes: the row size times the number of rows.
///
/// `tensor` is its name, which only errors use. `ne` is the number of elements in each dimension, innermost first; 1 for
/// unused dimensions.
///
/// # Errors
/// [`Fault::RowNotBlocks`] if a row is not a multiple of the block size; [`Fault::TooManyElements`] or
/// [`Fault::TooManyBytes`] for 2^63 or more elements or bytes.
pub fn tensor_size(tensor: &str, ty: GgmlType, ne: [u64; 4]) -> Result<u64, Fault> {
    let tensor = || tensor.to_owned();
    let elements = ne.iter().try_fold(1, |product, &n| below_i64(product, n));
    if elements.is_none() {
        return Err(Fault::TooManyElements {
            tensor: tensor(),
            ne,
        });
    }
    if !ne[0].is_multiple_of(ty.block_size()) {
        return Err(Fault::RowNotBlocks {
            tensor: tensor(),
            ty,
            ne0: ne[0],
        });
    }
    let row_size = ty.row_size(ne[0]).filter(|&size| size <= MAX_I64);
    let size = row_size.and_then(|size| {
        ne[1..]
            .iter()
            .try_fold(size, |product, &n| below_i64(product, n))
    });
    size.ok_or_else(|| Fault::TooManyBytes {
        tensor: tensor(),
        ty,
        ne,
    })
}

fn below_i64(a: u64, b: u64) -> Option<u64> {
    a.checked_mul(b).filter(|&product| product <= MAX_I64)
}

/// Appends a GGUF string: a 64-bit length, and the bytes.
pub fn write_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}
