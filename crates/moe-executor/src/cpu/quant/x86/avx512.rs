//! Kernels for AVX-512 F, BW, DQ, VL and VNNI.

use crate::cpu::quant::float::FloatFormat;
use crate::cpu::quant::format::Format;
use crate::cpu::quant::portable;

/// The portable kernel, compiled for 512-bit vectors.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub fn gemv<F: Format>(rows: &[u8], row_size: usize, n: usize, act: &[u8], out: &mut [f32]) {
    portable::gemv::<F>(rows, row_size, n, act, out);
}

/// The portable kernel, compiled for 512-bit vectors.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub fn gemv_float<F: FloatFormat>(
    rows: &[u8],
    row_size: usize,
    n: usize,
    act: &[u8],
    out: &mut [f32],
) {
    portable::gemv_float::<F>(rows, row_size, n, act, out);
}
