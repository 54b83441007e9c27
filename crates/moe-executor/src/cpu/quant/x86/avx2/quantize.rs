//! Conversion of activations with 256-bit vectors. The results are the same bytes as those of the portable code.

use std::arch::x86_64::*;

use zerocopy::byteorder::little_endian::F32;

use crate::cpu::quant::ActivationType;
use crate::cpu::quant::activation::{Q8RowMut, elements_mut};
use crate::cpu::quant::format::QK_K;

/// [`ActivationType::quantize`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn quantize(ty: ActivationType, row: &[f32], out: &mut [u8]) {
    match ty {
        ActivationType::F32 | ActivationType::Bf16 => ty.convert(row, out),
        ActivationType::F16 => round_to_f16(row, elements_mut(&mut out[..4 * row.len()])),
        ActivationType::Q8_0 | ActivationType::Q8_1 => quantize_q8_0(ty, row, out),
        ActivationType::Q8K => quantize_q8_k(row, out),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn round_to_f16(row: &[f32], out: &mut [F32]) {
    let (rows, rest) = row.as_chunks::<8>();
    let (outs, outs_rest) = out.as_chunks_mut::<8>();
    for (values, out) in rows.iter().zip(outs) {
        let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(load(values));
        // SAFETY: `out` has eight floats.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr().cast(), _mm256_cvtph_ps(halves)) };
    }
    for (value, out) in rest.iter().zip(outs_rest) {
        out.set(half_precision(*value));
    }
}

/// Rounds to half precision.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn half_precision(value: f32) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(
        _mm_set_ss(value),
    )))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load(values: &[f32; 8]) -> __m256 {
    // SAFETY: the array has eight floats.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

/// The bits of the larger magnitude in each lane. The bits of a NaN are larger than those of numbers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn max_magnitudes(max: __m256i, values: &[f32; 8]) -> __m256i {
    _mm256_max_epi32(max, magnitudes(values))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn magnitudes(values: &[f32; 8]) -> __m256i {
    _mm256_and_si256(
        _mm256_castps_si256(load(values)),
        _mm256_set1_epi32(i32::MAX),
    )
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn max_lane(v: __m256i) -> i32 {
    let v = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let v = _mm_max_epi32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
    let v = _mm_max_epi32(v, _mm_shuffle_epi32::<0b10_11_00_01>(v));
    _mm_cvtsi128_si32(v)
}

/// Writes `codes[i] = round(values[i] * inverse)`. Returns the sum of each sixteen codes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn round_32(values: &[f32; 32], inverse: f32, codes: &mut [i8; 32]) -> [i16; 2] {
    let (parts, _) = values.as_chunks::<8>();
    let round =
        |i: usize| _mm256_cvtps_epi32(_mm256_mul_ps(load(&parts[i]), _mm256_set1_ps(inverse)));
    let low = _mm256_packs_epi32(round(0), round(1));
    let high = _mm256_packs_epi32(round(2), round(3));
    // Packing interleaves the 128-bit halves of the vectors.
    let order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
    let packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    // SAFETY: the array has 32 bytes.
    unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed) };
    // Sums of eight codes plus 128 each.
    let sums = _mm256_sad_epu8(
        _mm256_xor_si256(packed, _mm256_set1_epi8(-128)),
        _mm256_setzero_si256(),
    );
    let sums = _mm256_add_epi64(sums, _mm256_unpackhi_epi64(sums, sums));
    let first = _mm256_extract_epi16::<0>(sums) - 16 * 128;
    let second = _mm256_extract_epi16::<8>(sums) - 16 * 128;
    [first as i16, second as i16]
}

#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_q8_0(ty: ActivationType, row: &[f32], out: &mut [u8]) {
    let out = Q8RowMut::new(ty, row.len(), out);
    let (blocks, _) = row.as_chunks::<32>();
    let (codes, _) = out.q.as_chunks_mut::<32>();
    let (block_sums, _) = out.sum.as_chunks_mut::<2>();
    for (i, values) in blocks.iter().enumerate() {
        let mut max = _mm256_setzero_si256();
        for part in values.as_chunks::<8>().0 {
            max = max_magnitudes(max, part);
        }
        let amax = f32::from_bits(max_lane(max) as u32);
        let inverse = if amax != 0.0 { 127.0 / amax } else { 0.0 };
        let sums = round_32(values, inverse, &mut codes[i]);
        let scale = amax / 127.0;
        out.scale[i].set(half_precision(scale));
        for (sum, value) in block_sums[i].iter_mut().zip(sums) {
            sum.set(value);
        }
        if ty == ActivationType::Q8_1 {
            out.scaled_sum[i].set(half_precision(scale * f32::from(sums[0] + sums[1])));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_q8_k(row: &[f32], out: &mut [u8]) {
    let out = Q8RowMut::new(ActivationType::Q8K, row.len(), out);
    let (blocks, _) = row.as_chunks::<QK_K>();
    let (codes, _) = out.q.as_chunks_mut::<QK_K>();
    let (block_sums, _) = out.sum.as_chunks_mut::<{ QK_K / 16 }>();
    for (i, values) in blocks.iter().enumerate() {
        let peak = first_peak(values);
        let inverse = if peak == 0.0 { 0.0 } else { -127.0 / peak };
        let (codes, _) = codes[i].as_chunks_mut::<32>();
        for (k, values) in values.as_chunks::<32>().0.iter().enumerate() {
            let sums = round_32(values, inverse, &mut codes[k]);
            block_sums[i][2 * k].set(sums[0]);
            block_sums[i][2 * k + 1].set(sums[1]);
        }
        out.scale[i].set(if peak == 0.0 { 0.0 } else { 1.0 / inverse });
    }
}

/// The first value with the largest magnitude.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn first_peak(values: &[f32; QK_K]) -> f32 {
    let (parts, _) = values.as_chunks::<8>();
    let mut max = _mm256_setzero_si256();
    for part in parts {
        max = max_magnitudes(max, part);
    }
    let max = _mm256_set1_epi32(max_lane(max));
    for part in parts {
        let equal = _mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitudes(part), max));
        let mask = _mm256_movemask_ps(equal) as u32;
        if mask != 0 {
            return part[mask.trailing_zeros() as usize];
        }
    }
    0.0
}
