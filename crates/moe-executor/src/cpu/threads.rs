//! A pool of threads that spin between jobs.
//!
//! A decoded token runs some hundred small products in sequence. Waking a sleeping thread for each would take as long as the
//! product, so workers spin for a while before they sleep. The calling thread computes chunks, too, and threads claim chunks
//! one by one, so that the caller never waits for a worker that has not started.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Jobs on fewer bytes of weights or activations run on the calling thread only: synchronization would take longer.
const MIN_BYTES: usize = 32 * 1024;

/// Chunks of a job per thread, so that fast threads compute more chunks than slow ones.
const CHUNKS_PER_THREAD: usize = 4;

/// How long a worker spins before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(300);

/// A pool of threads that compute the parts of one job in parallel.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

/// A job. It is on the stack of the calling thread.
struct Job<'a> {
    work: &'a (dyn Fn(Range<usize>) + Sync),
    /// Items of the job.
    n: usize,
    /// Items per chunk.
    chunk: usize,
    /// Completed chunks.
    done: AtomicUsize,
    panicked: AtomicBool,
}

struct Shared {
    /// Number of the job in the upper 32 bits, chunks that are not claimed in the lower 32 bits.
    state: AtomicU64,
    /// The job of `state`. The pointer is valid while a chunk of the job is claimed and not completed.
    job: AtomicPtr<Job<'static>>,
    /// Whether a job runs.
    busy: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

/// Mask of the chunks in [`Shared::state`].
const CHUNKS: u64 = u32::MAX as u64;

/// Number of threads that this process can run in parallel: one per logical core, unless the operating system limits it.
pub fn n_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Threads {
    /// A pool of `n` threads including the calling thread; 0 is treated as 1.
    ///
    /// # Errors
    /// The operating system cannot start the threads.
    pub fn new(n: usize) -> Result<Threads> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            busy: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let mut threads = Threads {
            shared,
            workers: Vec::new(),
        };
        for i in 1..n {
            let shared = threads.shared.clone();
            let builder = std::thread::Builder::new().name(format!("compute-{i}"));
            let worker = builder.spawn(move || shared.work());
            let worker = worker.map_err(|source| Error::Threads { threads: n, source })?;
            threads.workers.push(worker);
        }
        Ok(threads)
    }

    /// Number of threads, including the calling thread.
    pub fn n(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `work` on disjoint ranges that cover `0..n`. `bytes` is the memory that
    /// the complete work reads and writes; a small job runs on the calling thread only.
    ///
    /// # Panics
    /// If `work` panics.
    pub fn split(&self, n: usize, bytes: usize, work: impl Fn(Range<usize>) + Sync) {
        self.split_with_callback(n, bytes, || (), work);
    }

    /// Like [`Threads::split`], and calls `callback` once on the calling thread while the workers compute. Without workers, or
    /// if the job is small, it calls `callback` before `work`.
    ///
    /// # Panics
    /// If `work` or `callback` panics, after all work is done.
    pub fn split_with_callback(
        &self,
        n: usize,
        bytes: usize,
        callback: impl FnOnce(),
        work: impl Fn(Range<usize>) + Sync,
    ) {
        let is_small = self.workers.is_empty() || bytes < MIN_BYTES || n < 2;
        // A job that starts while another job runs uses the calling thread only.
        if is_small || self.shared.busy.swap(true, Ordering::Acquire) {
            callback();
            return work(0..n);
        }
        let chunks = (self.n() * CHUNKS_PER_THREAD).min(bytes.div_ceil(MIN_BYTES / 4));
        let chunk = n.div_ceil(chunks);
        let job = Job {
            work: &work,
            n,
            chunk,
            done: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
        };
        let outcome = self.shared.run(&job, callback);
        self.shared.busy.store(false, Ordering::Release);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        assert!(
            !job.panicked.load(Ordering::Relaxed),
            "a compute thread panicked"
        );
    }

    /// Calls `work` on each row of `input` and the corresponding row of `output`.
    pub(crate) fn zip_rows<T: Sync, U: Send>(
        &self,
        input: &[T],
        in_width: usize,
        output: &mut [U],
        out_width: usize,
        work: impl Fn(&[T], &mut [U]) + Sync,
    ) {
        let output = super::disjoint::Disjoint::new(output);
        self.split(input.len() / in_width, size_of_val(input), |rows| {
            // SAFETY: `split` passes disjoint ranges of rows, and a row is a range of elements of its own.
            let output = unsafe { output.slice(rows.start * out_width..rows.end * out_width) };
            let input = input[rows.start * in_width..rows.end * in_width].chunks_exact(in_width);
            input
                .zip(output.chunks_exact_mut(out_width))
                .for_each(|(row, out)| work(row, out));
        });
    }

    /// Calls `work` on the index of each row of `data` and the row.
    pub(crate) fn rows<T: Send>(
        &self,
        data: &mut [T],
        width: usize,
        work: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let bytes = size_of_val(data);
        let n = data.len() / width;
        let data = super::disjoint::Disjoint::new(data);
        self.split(n, bytes, |rows| {
            // SAFETY: `split` passes disjoint ranges of rows, and a row is a range of elements of its own.
            let part = unsafe { data.slice(rows.start * width..rows.end * width) };
            let part = part.chunks_exact_mut(width);
            rows.zip(part).for_each(|(i, row)| work(i, row));
        });
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake_all();
        for worker in self.workers.drain(..) {
            // A panic in a worker was reported to its job.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Publishes a job, calls `callback`, computes chunks, and returns when all chunks are complete. Returns an error if the
    /// callback panicked.
    fn run(&self, job: &Job, callback: impl FnOnce()) -> std::thread::Result<()> {
        let chunks = job.n.div_ceil(job.chunk);
        self.job
            .store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        let number = (self.state.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        // `SeqCst` here and for the count of sleepers: either this thread sees the sleeper, or the sleeper sees the job.
        self.state
            .store(number << 32 | chunks as u64, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
        // The job is on the stack of this thread, which must not unwind before all chunks are complete.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(callback));
        while self.claim() {}
        let mut spins = 0u32;
        while job.done.load(Ordering::Acquire) < chunks {
            spins += 1;
            // The thread that computes the chunk may be waiting for this core.
            if spins.is_multiple_of(1 << 12) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        outcome
    }

    /// Claims and runs one chunk of the current job. Returns false if all chunks are claimed.
    fn claim(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        let left = state & CHUNKS;
        if left == 0 {
            return false;
        }
        let job = self.job.load(Ordering::Relaxed);
        // If the exchange succeeds, `state` still belongs to the job loaded above: the next job, which has another number, is
        // published only after all chunks of this job are claimed and complete.
        let claimed =
            self.state
                .compare_exchange(state, state - 1, Ordering::AcqRel, Ordering::Relaxed);
        if claimed.is_err() {
            return true;
        }
        // SAFETY: the chunk is claimed and not complete, so `run` has not returned and its job is alive.
        let job = unsafe { &*job };
        let first = (left as usize - 1) * job.chunk;
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            (job.work)(first..(first + job.chunk).min(job.n));
        }));
        if outcome.is_err() {
            job.panicked.store(true, Ordering::Relaxed);
        }
        job.done.fetch_add(1, Ordering::Release);
        true
    }

    /// The loop of a worker thread.
    fn work(&self) {
        let mut idle_since = Instant::now();
        let mut spins = 0u32;
        while !self.stop.load(Ordering::Acquire) {
            if self.claim() {
                spins = 0;
                continue;
            }
            if spins == 0 {
                idle_since = Instant::now();
            }
            spins = spins.wrapping_add(1);
            std::hint::spin_loop();
            // Reading the clock takes longer than an iteration.
            if spins.is_multiple_of(64) && idle_since.elapsed() > SPIN_TIME {
                self.sleep();
                spins = 0;
            }
        }
    }

    fn sleep(&self) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.state.load(Ordering::SeqCst) & CHUNKS == 0 && !self.stop.load(Ordering::Acquire)
        {
            guard = self
                .wake
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake_all(&self) {
        // With the lock, no worker is between its last check of `state` and its wait.
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn visits(pool: &Threads, n: usize, bytes: usize) -> Vec<u32> {
        let seen: Vec<AtomicU32> = (0..n).map(|_| AtomicU32::new(0)).collect();
        pool.split(n, bytes, |range| {
            for i in range {
                seen[i].fetch_add(1, Ordering::Relaxed);
            }
        });
        seen.into_iter().map(AtomicU32::into_inner).collect()
    }

    #[test]
    fn visits_each_index_once() {
        for threads in [1, 2, 5] {
            let pool = Threads::new(threads).unwrap();
            assert_eq!(pool.n(), threads);
            for (n, bytes) in [
                (0, 1 << 20),
                (1, 1 << 20),
                (7, 1 << 20),
                (1000, 1 << 24),
                (5, 8),
            ] {
                assert_eq!(
                    visits(&pool, n, bytes),
                    vec![1; n],
                    "{threads} threads, n = {n}"
                );
            }
        }
    }

    #[test]
    fn runs_jobs_back_to_back_and_after_workers_sleep() {
        let pool = Threads::new(3).unwrap();
        for round in 0..300 {
            assert_eq!(visits(&pool, 50 + round, 1 << 20), vec![1; 50 + round]);
            if round % 100 == 0 {
                std::thread::sleep(SPIN_TIME * 4);
            }
        }
    }

    #[test]
    fn runs_nested_jobs() {
        let pool = Threads::new(2).unwrap();
        let sum = AtomicU32::new(0);
        pool.split(4, 1 << 20, |outer| {
            pool.split(10, 1 << 20, |inner| {
                sum.fetch_add((outer.len() * inner.len()) as u32, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 40);
    }

    #[test]
    fn calls_the_callback_once_for_any_amount_of_work() {
        for threads in [1, 3] {
            let pool = Threads::new(threads).unwrap();
            for (n, bytes) in [(0, 0), (5, 8), (100, 1 << 20)] {
                let (mut calls, rows) = (0, AtomicU32::new(0));
                pool.split_with_callback(
                    n,
                    bytes,
                    || calls += 1,
                    |range| {
                        rows.fetch_add(range.len() as u32, Ordering::Relaxed);
                    },
                );
                assert_eq!((calls, rows.into_inner()), (1, n as u32));
            }
        }
    }

    #[test]
    fn workers_compute_during_the_callback() {
        let pool = Threads::new(2).unwrap();
        let started = AtomicBool::new(false);
        let callback = || {
            let since = Instant::now();
            while !started.load(Ordering::Acquire) {
                assert!(
                    since.elapsed() < Duration::from_secs(60),
                    "no worker started"
                );
                std::thread::yield_now();
            }
        };
        pool.split_with_callback(100, 1 << 20, callback, |_| {
            started.store(true, Ordering::Release)
        });
    }

    #[test]
    fn serves_two_callers_at_the_same_time() {
        let pool = Threads::new(3).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for n in 2..200 {
                        assert_eq!(visits(&pool, n, 1 << 20), vec![1; n]);
                    }
                });
            }
        });
    }

    #[test]
    fn propagates_a_panic_and_stays_usable() {
        let pool = Threads::new(2).unwrap();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.split(100, 1 << 20, |range| {
                assert!(!range.contains(&42), "expected")
            });
        }));
        assert!(outcome.is_err());
        assert_eq!(visits(&pool, 100, 1 << 20), vec![1; 100]);
    }

    #[test]
    fn propagates_a_panic_of_the_callback_after_the_work() {
        let pool = Threads::new(2).unwrap();
        let rows = AtomicU32::new(0);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let callback = || panic!("expected");
            pool.split_with_callback(100, 1 << 20, callback, |range| {
                rows.fetch_add(range.len() as u32, Ordering::Relaxed);
            });
        }));
        assert!(outcome.is_err());
        assert_eq!(rows.into_inner(), 100);
        assert_eq!(visits(&pool, 100, 1 << 20), vec![1; 100]);
    }
}
