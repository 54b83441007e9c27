//! Rules of the format that readers and writers share.

use crate::error::Fault;
use crate::types::GgmlType;

/// Alignment of a file without `general.alignment`.
pub const DEFAULT_ALIGNMENT: u32 = 32;

/// Dimensions that a tensor may have.
pub const MAX_DIMS: u32 = 4;

/// Bytes of the longest tensor name: ggml keeps it in 64 bytes with its terminating zero.
pub const MAX_NAME: u64 = 63;

/// ggml counts elements and bytes in 63 bits.
pub const MAX_I64: u64 = i64::MAX as u64;

/// Bytes of a tensor: bytes of a row, times its rows. `tensor` is its name, for the error.
///
/// # Errors
/// A row is not a whole number of blocks, or the elements or bytes do not fit 63 bits.
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

/// Appends a GGUF string: 64-bit length, then the bytes.
pub fn write_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}
