//! NaN and infinite elements and block scales.

use serde::Serialize;

use crate::gguf::Tensor;
use crate::types::GgmlType;

/// Number and location of the NaN and infinite values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct NonFinite {
    /// Number of elements or block scales that are not finite.
    pub count: u64,
    /// Offset of the first of them from the start of the file, in bytes.
    pub first_offset: u64,
}

/// The encoding of a number that must be finite.
#[derive(Clone, Copy)]
enum Float {
    F16,
    Bf16,
    F32,
    F64,
    /// An MXFP4 block: the E8M0 scale, and its elements. Scale 255 is NaN; 253 and 254 make large elements infinite.
    Mxfp4,
    /// The scale of IQ1_M: an F16 in the top four bits of each of four 16-bit words.
    Iq1m,
}

/// Searches the data of a tensor for values that are not finite. The outer `None` means that the type cannot be checked.
pub(crate) fn non_finite(tensor: &Tensor, data: &[u8]) -> Option<Option<NonFinite>> {
    let (row_floats, block_floats) = floats(tensor.ty)?;
    let block = usize::try_from(tensor.ty.type_size()).ok()?;
    let row_meta = usize::try_from(tensor.ty.row_meta_size()).ok()?;
    let row = usize::try_from(tensor.ty.row_size(tensor.ne[0])?).ok()?;

    let mut found: Option<NonFinite> = None;
    let mut check = |bytes: &[u8], start: usize, floats: &[(usize, Float)]| {
        for &(offset, float) in floats {
            if !bytes
                .get(offset..)
                .is_none_or(|bytes| is_finite(bytes, float))
            {
                let first_offset = tensor.offset + (start + offset) as u64;
                found
                    .get_or_insert(NonFinite {
                        count: 0,
                        first_offset,
                    })
                    .count += 1;
            }
        }
    };
    for (i, row_bytes) in data.chunks_exact(row.max(1)).enumerate() {
        check(row_bytes, i * row, row_floats);
        let Some(blocks) = row_bytes.get(row_meta..) else {
            continue;
        };
        for (j, bytes) in blocks.chunks_exact(block).enumerate() {
            check(bytes, i * row + row_meta + j * block, block_floats);
        }
    }
    Some(found)
}

/// Numbers by their byte offset in a row or block, with their encoding.
type Floats = &'static [(usize, Float)];

/// Returns the numbers of each row, and of each block, that must be finite. `None` for the interleaved types of ik_llama.cpp,
/// where several rows share a block.
fn floats(ty: GgmlType) -> Option<(Floats, Floats)> {
    use Float::*;
    use GgmlType as T;
    Some(match ty {
        // Every scale of NVFP4 (UE4M3) is finite: ggml reads the NaN encoding as 0.
        T::I8 | T::I16 | T::I32 | T::I64 | T::NVFP4 => (&[], &[]),
        T::F64 => (&[], &[(0, F64)]),
        T::F32 | T::Q8_K => (&[], &[(0, F32)]),
        T::BF16 => (&[], &[(0, Bf16)]),
        T::F16 | T::Q4_0 | T::Q5_0 | T::Q8_0 | T::Q6_0 => (&[], &[(0, F16)]),
        T::Q4_1 | T::Q5_1 | T::Q8_1 | T::Q4_K | T::Q5_K => (&[], &[(0, F16), (2, F16)]),
        T::Q2_K => (&[], &[(80, F16), (82, F16)]),
        T::Q3_K => (&[], &[(108, F16)]),
        T::Q6_K => (&[], &[(208, F16)]),
        T::IQ1_S | T::IQ2_XXS | T::IQ2_XS | T::IQ2_S | T::IQ3_XXS | T::IQ3_S => (&[], &[(0, F16)]),
        T::IQ4_NL | T::IQ4_XS | T::Q1_0 | T::Q2_0 => (&[], &[(0, F16)]),
        T::IQ1_M => (&[], &[(48, Iq1m)]),
        T::TQ1_0 => (&[], &[(52, F16)]),
        T::TQ2_0 => (&[], &[(64, F16)]),
        T::MXFP4 => (&[], &[(0, Mxfp4)]),
        T::IQ2_K | T::IQ3_K | T::IQ4_K | T::IQ5_K | T::IQ6_K => (&[], &[(0, F16)]),
        T::IQ2_KS | T::IQ3_KS | T::IQ2_KL => (&[(0, F16)], &[]),
        T::IQ4_KS | T::IQ4_KSS | T::IQ5_KS => (&[(0, F32)], &[]),
        T::IQ1_KT | T::IQ2_KT | T::IQ3_KT | T::IQ4_KT => (&[(0, F32)], &[]),
        _ => return None,
    })
}

fn is_finite(bytes: &[u8], float: Float) -> bool {
    // The default is unreachable unless an offset in the table above is wrong.
    let u16_at = |i: usize| {
        bytes
            .get(i..i + 2)
            .map_or(0, |b| u16::from_le_bytes([b[0], b[1]]))
    };
    match float {
        Float::F16 => f16_is_finite(u16_at(0)),
        Float::Bf16 => u16_at(0) & 0x7F80 != 0x7F80,
        Float::F32 => u16_at(2) & 0x7F80 != 0x7F80,
        Float::F64 => u16_at(6) & 0x7FF0 != 0x7FF0,
        // The scale is 2^(e - 127). Of the E2M1 elements, codes 4 and 6 are 2.0 and 4.0; the top bit of the code is the sign.
        Float::Mxfp4 => match bytes.split_first() {
            Some((255, _)) => false,
            Some((254, elements)) => codes_are_below(elements, 4),
            Some((253, elements)) => codes_are_below(elements, 6),
            _ => true,
        },
        Float::Iq1m => {
            let nibble = |i: usize| u16_at(2 * i) & 0xF000;
            f16_is_finite(nibble(0) >> 12 | nibble(1) >> 8 | nibble(2) >> 4 | nibble(3))
        }
    }
}

/// Whether all elements of an MXFP4 block, two per byte, have a code below `code`, without sign.
fn codes_are_below(elements: &[u8], code: u8) -> bool {
    let elements = elements.iter().take(16);
    elements
        .flat_map(|byte| [byte & 7, byte >> 4 & 7])
        .all(|found| found < code)
}

fn f16_is_finite(bits: u16) -> bool {
    bits & 0x7C00 != 0x7C00
}
