//! Software prefetch of memory that a thread reads as several sequential streams.

/// Distance from a read to the memory that is prefetched, bytes, for a single stream. Several streams divide it.
///
/// The streams together have this much memory in flight. Measured with `benches/products.rs`: half of it is slower on an Intel
/// CPU, and twice as much is slower with all threads (`docs/measurements/cpu-rows.txt`).
const DISTANCE: usize = 4096;

/// Prefetches the cache lines that one of `STREAMS` streams reads soon. The caller reads the `n` elements at `at` now.
///
/// Hardware prefetchers stop at the end of a page, and the instructions of a product leave few reads in flight.
#[inline(always)]
pub fn prefetch<const STREAMS: usize, T>(at: *const T, n: usize) {
    for line in (0..n * size_of::<T>()).step_by(64) {
        let line = at.cast::<i8>().wrapping_add(DISTANCE / STREAMS + line);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch does not access memory in the sense of the language, so any address is allowed.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(line);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }
}
