//! Work spread over threads that wait awake.
//!
//! A decoded token runs some hundred small products one after the other; waking a sleeping thread for each would cost as
//! much as the product. So the workers spin for a while before they sleep. The caller works too, and never waits for a
//! worker that has not begun: a chunk belongs to whoever claims it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Below this many bytes of weights or activations a second thread costs more than it brings.
const MIN_BYTES: usize = 32 * 1024;

/// Chunks of a job for each thread: a thread that is slow or late leaves chunks to the others.
const CHUNKS_PER_THREAD: usize = 4;

/// How long a worker waits awake for the next job.
const AWAKE: Duration = Duration::from_micros(300);

/// A pool of threads.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

/// One piece of work, on the caller's stack.
struct Job<'a> {
    work: &'a (dyn Fn(Range<usize>) + Sync),
    n: usize,
    chunk: usize,
    /// Chunks that are done.
    done: AtomicUsize,
    panicked: AtomicBool,
}

struct Shared {
    /// Number of the job in the upper half, chunks left to claim in the lower.
    state: AtomicU64,
    /// The job that `state` speaks of. Valid while one of its chunks is claimed and not done.
    job: AtomicPtr<Job<'static>>,
    /// Whether a job runs.
    busy: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

const CHUNKS: u64 = u32::MAX as u64;

/// Threads that this program may run at once: one a core, unless the system allows fewer.
pub fn n_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Threads {
    /// A pool of `n` threads, the caller's own counted; 0 counts as 1.
    ///
    /// # Errors
    /// When the system does not give the threads.
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

    /// Number of threads.
    pub fn n(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `work` on ranges that together cover `0..n` once. `bytes` is the memory that the whole work touches.
    ///
    /// # Panics
    /// If `work` does.
    pub fn split(&self, n: usize, bytes: usize, work: impl Fn(Range<usize>) + Sync) {
        self.split_beside(n, bytes, || (), work);
    }

    /// As [`Threads::split`]; this thread does `errand` first, while the others work already. Where there are no others, or the
    /// work is small, it comes before the work.
    ///
    /// # Panics
    /// If `work` or `errand` does.
    pub fn split_beside(
        &self,
        n: usize,
        bytes: usize,
        errand: impl FnOnce(),
        work: impl Fn(Range<usize>) + Sync,
    ) {
        let is_small = self.workers.is_empty() || bytes < MIN_BYTES || n < 2;
        // A job within a job, or beside one, has this thread alone.
        if is_small || self.shared.busy.swap(true, Ordering::Acquire) {
            errand();
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
        let outcome = self.shared.run(&job, errand);
        self.shared.busy.store(false, Ordering::Release);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        assert!(
            !job.panicked.load(Ordering::Relaxed),
            "a compute thread panicked"
        );
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
        let output = super::disjoint::Disjoint::new(output);
        self.split(input.len() / in_width, size_of_val(input), |rows| {
            // SAFETY: ranges of rows do not overlap between threads.
            let output = unsafe { output.slice(rows.start * out_width..rows.end * out_width) };
            let input = input[rows.start * in_width..rows.end * in_width].chunks_exact(in_width);
            input
                .zip(output.chunks_exact_mut(out_width))
                .for_each(|(row, out)| work(row, out));
        });
    }

    /// Calls `work` on each row of `data` and its number.
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
            // SAFETY: ranges of rows do not overlap between threads.
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
            // A worker that panicked has told its job so.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Publishes a job, does the errand, works on the job, and returns when all of it is done; an error if the errand
    /// panicked.
    fn run(&self, job: &Job, errand: impl FnOnce()) -> std::thread::Result<()> {
        let chunks = job.n.div_ceil(job.chunk);
        self.job
            .store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        let number = (self.state.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        // SeqCst here and at the sleeper's count: either this thread sees the sleeper, or it sees the job.
        self.state
            .store(number << 32 | chunks as u64, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
        // The job is on this thread's stack, which must not unwind before all is done.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(errand));
        while self.claim() {}
        let mut spins = 0u32;
        while job.done.load(Ordering::Acquire) < chunks {
            spins += 1;
            // The chunk's owner may be waiting for this core.
            if spins.is_multiple_of(1 << 12) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        outcome
    }

    /// Runs one chunk of the current job; false if none is left.
    fn claim(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        let left = state & CHUNKS;
        if left == 0 {
            return false;
        }
        let job = self.job.load(Ordering::Relaxed);
        // Success says that `state` is still that of the job loaded above: the next job is published only when every
        // chunk of this one is claimed and done, and its number differs.
        let claimed =
            self.state
                .compare_exchange(state, state - 1, Ordering::AcqRel, Ordering::Relaxed);
        if claimed.is_err() {
            return true;
        }
        // SAFETY: the chunk is claimed and not done, so the caller of `run` still waits and its job is alive.
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

    /// Life of a worker.
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
            // Looking at the clock costs more than a turn.
            if spins.is_multiple_of(64) && idle_since.elapsed() > AWAKE {
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
        // Taking the lock makes sure that no worker is between its last look and its sleep.
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
    fn every_index_is_visited_once() {
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
    fn jobs_follow_each_other_closely_and_after_a_pause() {
        let pool = Threads::new(3).unwrap();
        for round in 0..300 {
            assert_eq!(visits(&pool, 50 + round, 1 << 20), vec![1; 50 + round]);
            if round % 100 == 0 {
                std::thread::sleep(AWAKE * 4);
            }
        }
    }

    #[test]
    fn a_job_within_a_job_runs() {
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
    fn an_errand_is_done_once_whatever_the_work() {
        for threads in [1, 3] {
            let pool = Threads::new(threads).unwrap();
            for (n, bytes) in [(0, 0), (5, 8), (100, 1 << 20)] {
                let (mut errands, rows) = (0, AtomicU32::new(0));
                pool.split_beside(
                    n,
                    bytes,
                    || errands += 1,
                    |range| {
                        rows.fetch_add(range.len() as u32, Ordering::Relaxed);
                    },
                );
                assert_eq!((errands, rows.into_inner()), (1, n as u32));
            }
        }
    }

    #[test]
    fn the_others_work_while_the_caller_is_on_its_errand() {
        let pool = Threads::new(2).unwrap();
        let begun = AtomicBool::new(false);
        let errand = || {
            let since = Instant::now();
            while !begun.load(Ordering::Acquire) {
                assert!(since.elapsed() < Duration::from_secs(60), "nobody works");
                std::thread::yield_now();
            }
        };
        pool.split_beside(100, 1 << 20, errand, |_| {
            begun.store(true, Ordering::Release)
        });
    }

    #[test]
    fn two_callers_share_a_pool() {
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
    fn a_panic_reaches_the_caller_and_leaves_the_pool_usable() {
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
    fn a_panic_of_an_errand_comes_when_the_work_is_done() {
        let pool = Threads::new(2).unwrap();
        let rows = AtomicU32::new(0);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let errand = || panic!("expected");
            pool.split_beside(100, 1 << 20, errand, |range| {
                rows.fetch_add(range.len() as u32, Ordering::Relaxed);
            });
        }));
        assert!(outcome.is_err());
        assert_eq!(rows.into_inner(), 100);
        assert_eq!(visits(&pool, 100, 1 << 20), vec![1; 100]);
    }
}
