//! Work spread over threads.

use std::ops::Range;

use rayon::prelude::*;

use crate::error::{Error, Result};

/// Below this many bytes of weights or activations a second thread costs more than it brings
/// (waking one takes several microseconds).
const MIN_BYTES: usize = 128 * 1024;

/// A pool of threads.
pub struct Threads {
    pool: Option<rayon::ThreadPool>,
    n: usize,
}

impl Threads {
    /// A pool of `n` threads.
    ///
    /// # Errors
    /// When the system does not give the threads.
    pub fn new(n: usize) -> Result<Threads> {
        let n = n.max(1);
        let pool = match n {
            1 => None,
            _ => {
                let built = rayon::ThreadPoolBuilder::new().num_threads(n).build();
                Some(built.map_err(|e| Error::Threads {
                    threads: n,
                    reason: e.to_string(),
                })?)
            }
        };
        Ok(Threads { pool, n })
    }

    /// Number of threads.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Runs `work` on ranges that together cover `0..n` once. `bytes` is the memory that the whole work touches.
    pub fn split(&self, n: usize, bytes: usize, work: impl Fn(Range<usize>) + Sync) {
        match &self.pool {
            Some(pool) if bytes >= MIN_BYTES && n > 1 => {
                // Several chunks a thread, so that a slow thread does not hold the others up.
                let chunk = n
                    .div_ceil((self.n * 4).min((bytes / (MIN_BYTES / 4)).max(self.n)))
                    .max(1);
                pool.install(|| {
                    (0..n.div_ceil(chunk))
                        .into_par_iter()
                        .for_each(|i| work(i * chunk..((i + 1) * chunk).min(n)));
                });
            }
            _ => work(0..n),
        }
    }

    /// Calls `work` on each row of `input` and the matching row of `output`.
    pub(crate) fn zip_rows<T: Sync, U: Send>(
        &self,
        input: &[T],
        in_width: usize,
        output: &mut [U],
        out_width: usize,
        work: impl Fn(&[T], &mut [U]) + Sync,
    ) {
        let rows = input.len() / in_width;
        match &self.pool {
            Some(pool) if rows > 1 && std::mem::size_of_val(input) >= MIN_BYTES => {
                pool.install(|| {
                    let pairs = input
                        .par_chunks_exact(in_width)
                        .zip(output.par_chunks_exact_mut(out_width));
                    pairs.for_each(|(row, out)| work(row, out));
                })
            }
            _ => {
                let pairs = input
                    .chunks_exact(in_width)
                    .zip(output.chunks_exact_mut(out_width));
                pairs.for_each(|(row, out)| work(row, out));
            }
        }
    }
}

/// A slice that several threads write at places that do not overlap.
pub(crate) struct Disjoint<'a> {
    ptr: *mut f32,
    len: usize,
    _slice: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointer comes from an exclusive borrow that lives as long as `Disjoint`; `write` and `slice` leave
// it to the caller that no two threads touch the same element.
unsafe impl Sync for Disjoint<'_> {}

impl<'a> Disjoint<'a> {
    pub(crate) fn new(slice: &'a mut [f32]) -> Disjoint<'a> {
        Disjoint {
            ptr: slice.as_mut_ptr(),
            len: slice.len(),
            _slice: std::marker::PhantomData,
        }
    }

    /// The elements `range`.
    ///
    /// # Safety
    /// No other thread may use an element of `range` while the returned slice lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn every_index_is_visited_once() {
        for threads in [1, 2, 3] {
            let pool = Threads::new(threads).unwrap();
            for (n, bytes) in [
                (0, 1 << 20),
                (1, 1 << 20),
                (7, 1 << 20),
                (1000, 1 << 24),
                (5, 8),
            ] {
                let seen: Vec<AtomicU32> = (0..n).map(|_| AtomicU32::new(0)).collect();
                pool.split(n, bytes, |range| {
                    for i in range {
                        seen[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(
                    seen.iter().all(|s| s.load(Ordering::Relaxed) == 1),
                    "{threads} threads, n = {n}"
                );
            }
        }
    }
}
