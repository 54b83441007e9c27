//! f32 vectors for kernels that do not depend on a quantization format: written once, compiled for each instruction set.
//!
//! [`dispatch`] calls a function with the target features of the instruction set, into which the kernel is inlined.

use crate::cpu::quant::{Isa, f16_to_f32};

/// f32 vectors of an instruction set.
///
/// # Safety
/// Implementations use only the instructions that they are named after. Callers of the methods guarantee that the CPU has
/// these instructions, and that pointers are valid for `LANES` values (without alignment).
pub(crate) unsafe trait Simd {
    /// A vector register.
    type Vector: Copy;
    /// f32 values per vector.
    const LANES: usize;

    unsafe fn splat(x: f32) -> Self::Vector;
    unsafe fn load(at: *const f32) -> Self::Vector;
    /// `LANES` half-precision numbers, converted exactly.
    unsafe fn load_f16(at: *const u16) -> Self::Vector;
    /// `LANES` integers, converted exactly.
    unsafe fn load_i8(at: *const i8) -> Self::Vector;
    unsafe fn store(at: *mut f32, x: Self::Vector);
    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn mul(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn div(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`
    unsafe fn mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// The minimum; `b` if one of the values is NaN.
    unsafe fn min(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The maximum; `b` if one of the values is NaN.
    unsafe fn max(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The nearest integer, ties to even.
    unsafe fn round(x: Self::Vector) -> Self::Vector;
    /// `x * 2^n` for integers `n` from -126 to 127.
    unsafe fn times_power_of_two(x: Self::Vector, n: Self::Vector) -> Self::Vector;
    /// Sum of the lanes.
    unsafe fn sum(x: Self::Vector) -> f32;
}

/// A kernel that is compiled for each instruction set.
pub(crate) trait Kernel {
    /// Runs the kernel. Implementations are `#[inline(always)]`, so that they are compiled with the instructions of `S`.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    unsafe fn run<S: Simd>(self);
}

/// Runs `kernel` with the widest vectors of this CPU.
pub(crate) fn dispatch<K: Kernel>(kernel: K) {
    dispatch_with(Isa::best(), kernel);
}

/// Runs `kernel` with the vectors of `isa`, which must be one of [`Isa::available`].
pub(crate) fn dispatch_with<K: Kernel>(isa: Isa, kernel: K) {
    // SAFETY: all callers pass a value of `Isa::available` or `Isa::best`, so the CPU has the instructions.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => x86::avx512(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::avx2(kernel),
            _ => kernel.run::<Portable>(),
        }
    }
}

/// `e^x` of each lane. The error is at most 2 units in the last place for `x` from -87 to 88; other `x` are clamped to this
/// range.
///
/// The method is the reduction to `2^n · e^r` with `|r| <= ln(2) / 2` (Cody and Waite, "Software Manual for the Elementary
/// Functions", 1980), and the Taylor polynomial of degree 7.
///
/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::Vector) -> S::Vector {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const COEFFICIENTS: [f32; 7] = [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    // SAFETY: by the contract of this function.
    unsafe {
        // `x` is the second operand of both, so NaN stays NaN.
        let x = S::min(S::splat(88.0), S::max(S::splat(-87.0), x));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let r = S::mul_add(n, S::splat(-LN2_HIGH), x);
        let r = S::mul_add(n, S::splat(-LN2_LOW), r);
        let mut sum = S::splat(1.0 / 5040.0);
        for c in COEFFICIENTS {
            sum = S::mul_add(sum, r, S::splat(c));
        }
        S::times_power_of_two(sum, n)
    }
}

/// Vectors without instructions of a particular CPU: arrays of eight values, which the compiler may keep in registers.
pub(crate) struct Portable;

const PORTABLE: usize = 8;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; PORTABLE] {
    std::array::from_fn(f)
}

// SAFETY: uses only the baseline instructions of the target.
unsafe impl Simd for Portable {
    type Vector = [f32; PORTABLE];
    const LANES: usize = PORTABLE;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::Vector {
        [x; PORTABLE]
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self::Vector {
        // SAFETY: the caller guarantees `LANES` values at `at`; the access is unaligned.
        unsafe { at.cast::<Self::Vector>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u16) -> Self::Vector {
        // SAFETY: the caller guarantees `LANES` values at `at`; the access is unaligned.
        unsafe { at.cast::<[u16; PORTABLE]>().read_unaligned() }.map(f16_to_f32)
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const i8) -> Self::Vector {
        // SAFETY: the caller guarantees `LANES` values at `at`.
        unsafe { at.cast::<[i8; PORTABLE]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn store(at: *mut f32, x: Self::Vector) {
        // SAFETY: the caller guarantees `LANES` values at `at`; the access is unaligned.
        unsafe { at.cast::<Self::Vector>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        each(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn min(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn max(a: Self::Vector, b: Self::Vector) -> Self::Vector {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn round(x: Self::Vector) -> Self::Vector {
        each(|i| x[i].round_ties_even())
    }
    #[inline(always)]
    unsafe fn times_power_of_two(x: Self::Vector, n: Self::Vector) -> Self::Vector {
        each(|i| x[i] * f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn sum(x: Self::Vector) -> f32 {
        x.iter().sum()
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Kernel, Simd};

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn avx2<K: Kernel>(kernel: K) {
        // SAFETY: this function can only be called if the CPU has its target features, which are those of `S`.
        unsafe { kernel.run::<Avx2>() }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")]
    pub(super) fn avx512<K: Kernel>(kernel: K) {
        // SAFETY: this function can only be called if the CPU has its target features, which are those of `S`.
        unsafe { kernel.run::<Avx512>() }
    }

    /// Methods of [`Simd`] that consist of a few intrinsics.
    macro_rules! methods {
        ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty = $body:expr;)*) => {$(
            #[inline(always)]
            unsafe fn $name($($arg: $ty),*) -> $out {
                // SAFETY: by the contract of `Simd`, the CPU has the instructions and pointers are valid for `LANES` values.
                unsafe { $body }
            }
        )*};
    }

    struct Avx2;

    // SAFETY: uses only AVX2, FMA and F16C, which `avx2` enables.
    unsafe impl Simd for Avx2 {
        type Vector = __m256;
        const LANES: usize = 8;

        methods! {
            fn splat(x: f32) -> __m256 = _mm256_set1_ps(x);
            fn load(at: *const f32) -> __m256 = _mm256_loadu_ps(at);
            fn load_f16(at: *const u16) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(at.cast()));
            fn load_i8(at: *const i8) -> __m256 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())));
            fn store(at: *mut f32, x: __m256) -> () = _mm256_storeu_ps(at, x);
            fn add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
            fn mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
            fn div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
            fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
            fn min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
            fn max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
            fn round(x: __m256) -> __m256 = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            fn times_power_of_two(x: __m256, n: __m256) -> __m256 = {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
            };
            fn sum(x: __m256) -> f32 = {
                let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            };
        }
    }

    struct Avx512;

    // SAFETY: uses only AVX-512 F, which `avx512` enables.
    unsafe impl Simd for Avx512 {
        type Vector = __m512;
        const LANES: usize = 16;

        methods! {
            fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
            fn load(at: *const f32) -> __m512 = _mm512_loadu_ps(at);
            fn load_f16(at: *const u16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()));
            fn load_i8(at: *const i8) -> __m512 = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())));
            fn store(at: *mut f32, x: __m512) -> () = _mm512_storeu_ps(at, x);
            fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
            fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
            fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
            fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
            fn min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
            fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
            fn round(x: __m512) -> __m512 = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            fn times_power_of_two(x: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(x, n);
            fn sum(x: __m512) -> f32 = _mm512_reduce_add_ps(x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Exp<'a>(&'a [f32], &'a mut [f32]);

    impl Kernel for Exp<'_> {
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            let chunks = self.0.chunks_exact(S::LANES);
            for (x, out) in chunks.zip(self.1.chunks_exact_mut(S::LANES)) {
                // SAFETY: both chunks have `LANES` values; the CPU has the instructions by the contract of `run`.
                unsafe { S::store(out.as_mut_ptr(), exp::<S>(S::load(x.as_ptr()))) };
            }
        }
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let x: Vec<f32> = (0..16 * 20_000)
            .map(|i| -87.0 + i as f32 * (175.0 / 320_000.0))
            .collect();
        for isa in Isa::available() {
            let mut out = vec![0.0; x.len()];
            dispatch_with(isa, Exp(&x, &mut out));
            for (x, got) in x.iter().zip(&out) {
                let want = f64::from(*x).exp();
                let unit = f64::from(f32::EPSILON) * want;
                assert!(
                    (f64::from(*got) - want).abs() <= 2.0 * unit,
                    "{isa:?}: e^{x} = {got}, not {want}"
                );
            }
        }
    }

    #[test]
    fn exp_propagates_nan() {
        for isa in Isa::available() {
            let mut out = vec![0.0; 16];
            dispatch_with(isa, Exp(&[f32::NAN; 16], &mut out));
            assert!(out.iter().all(|x| x.is_nan()), "{isa:?}");
        }
    }

    #[test]
    fn exp_clamps_to_the_range_of_f32() {
        for isa in Isa::available() {
            let x = [f32::NEG_INFINITY, -1e9, 1e9, 0.0, -88.0, 89.0, 1.0, -1.0].repeat(2);
            let mut out = vec![0.0; 16];
            dispatch_with(isa, Exp(&x, &mut out));
            let (small, large) = ((-87f32).exp(), 88f32.exp());
            let want = [
                small,
                small,
                large,
                1.0,
                small,
                large,
                1f32.exp(),
                (-1f32).exp(),
            ]
            .repeat(2);
            for (got, want) in out.iter().zip(&want) {
                assert!((got / want - 1.0).abs() < 1e-6, "{isa:?}: {got} {want}");
            }
        }
    }
}
