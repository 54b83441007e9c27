//! Transposition of a square of 32-bit elements.

use std::arch::x86_64::*;

/// Transposes 16 × 16 elements: lane `i` of vector `r` becomes lane `r` of vector `i`.
#[target_feature(enable = "avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
pub fn transpose(mut v: [__m512i; 16]) -> [__m512i; 16] {
    let mut w = v;
    // Within each 128 bits, interleave elements of neighboring rows, then pairs of elements of rows 2 apart.
    for r in (0..16).step_by(2) {
        w[r] = _mm512_unpacklo_epi32(v[r], v[r + 1]);
        w[r + 1] = _mm512_unpackhi_epi32(v[r], v[r + 1]);
    }
    for r in (0..16).step_by(4) {
        v[r] = _mm512_unpacklo_epi64(w[r], w[r + 2]);
        v[r + 1] = _mm512_unpackhi_epi64(w[r], w[r + 2]);
        v[r + 2] = _mm512_unpacklo_epi64(w[r + 1], w[r + 3]);
        v[r + 3] = _mm512_unpackhi_epi64(w[r + 1], w[r + 3]);
    }
    // Vector `4 * a + b` now has columns `b`, `b + 4`, `b + 8`, `b + 12` of rows `4 * a` to `4 * a + 3`, 128 bits each.
    // Exchange these between vectors 4 apart, then 8 apart.
    for b in 0..4 {
        let (low, high) = (
            _mm512_shuffle_i32x4::<0x88>(v[b], v[b + 4]),
            _mm512_shuffle_i32x4::<0xdd>(v[b], v[b + 4]),
        );
        let (low_8, high_8) = (
            _mm512_shuffle_i32x4::<0x88>(v[b + 8], v[b + 12]),
            _mm512_shuffle_i32x4::<0xdd>(v[b + 8], v[b + 12]),
        );
        w[b] = _mm512_shuffle_i32x4::<0x88>(low, low_8);
        w[b + 8] = _mm512_shuffle_i32x4::<0xdd>(low, low_8);
        w[b + 4] = _mm512_shuffle_i32x4::<0x88>(high, high_8);
        w[b + 12] = _mm512_shuffle_i32x4::<0xdd>(high, high_8);
    }
    w
}
