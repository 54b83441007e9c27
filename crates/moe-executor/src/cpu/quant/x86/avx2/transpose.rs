//! Transposition of a square of 32-bit elements.

use std::arch::x86_64::*;

/// Transposes 8 × 8 elements: lane `i` of vector `r` becomes lane `r` of vector `i`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub fn transpose(mut v: [__m256i; 8]) -> [__m256i; 8] {
    let mut w = v;
    // Within each 128 bits, interleave elements of neighboring rows, then pairs of elements of rows 2 apart.
    for r in (0..8).step_by(2) {
        w[r] = _mm256_unpacklo_epi32(v[r], v[r + 1]);
        w[r + 1] = _mm256_unpackhi_epi32(v[r], v[r + 1]);
    }
    for r in (0..8).step_by(4) {
        v[r] = _mm256_unpacklo_epi64(w[r], w[r + 2]);
        v[r + 1] = _mm256_unpackhi_epi64(w[r], w[r + 2]);
        v[r + 2] = _mm256_unpacklo_epi64(w[r + 1], w[r + 3]);
        v[r + 3] = _mm256_unpackhi_epi64(w[r + 1], w[r + 3]);
    }
    for i in 0..4 {
        w[i] = _mm256_permute2x128_si256::<0x20>(v[i], v[i + 4]);
        w[i + 4] = _mm256_permute2x128_si256::<0x31>(v[i], v[i + 4]);
    }
    w
}
