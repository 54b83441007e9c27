//! A thread that sleeps until it is given something to do.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

/// A thread that does one job at a time. Dropping it waits for the job that it has.
pub(super) struct Worker<J, O> {
    /// None while it is dropped: the thread ends when there is nobody left to give it a job.
    jobs: Option<SyncSender<J>>,
    outcomes: Receiver<O>,
    thread: Option<JoinHandle<()>>,
}

impl<J: Send + 'static, O: Send + 'static> Worker<J, O> {
    /// A thread called `name` that does jobs by `run`.
    ///
    /// # Errors
    /// The system does not give the thread.
    pub(super) fn spawn(
        name: &str,
        mut run: impl FnMut(J) -> O + Send + 'static,
    ) -> io::Result<Worker<J, O>> {
        let (jobs, inbox) = sync_channel(1);
        let (outbox, outcomes) = sync_channel(1);
        let life = move || {
            for job in inbox {
                if outbox.send(run(job)).is_err() {
                    return;
                }
            }
        };
        Ok(Worker {
            jobs: Some(jobs),
            outcomes,
            thread: Some(Builder::new().name(name.to_owned()).spawn(life)?),
        })
    }

    /// Gives it a job; the outcome of the one before has been taken. If the thread has died, its outcome is none.
    pub(super) fn give(&self, job: J) {
        if let Some(jobs) = &self.jobs {
            // That nobody takes it shows in the outcome.
            let _ = jobs.send(job);
        }
    }

    /// Waits for the outcome of the job that it was given; none if the thread has died.
    pub(super) fn outcome(&self) -> Option<O> {
        self.outcomes.recv().ok()
    }
}

impl<J, O> Drop for Worker<J, O> {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // One that panicked has told so by having no outcome.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_job_has_its_outcome_on_a_thread_of_that_name() {
        let mut sum = 0;
        let add = move |n: u32| {
            sum += n;
            (sum, std::thread::current().name().map(str::to_owned))
        };
        let worker = Worker::spawn("adds", add).unwrap();
        for expected in [3, 6, 9] {
            worker.give(3);
            assert_eq!(worker.outcome(), Some((expected, Some("adds".to_owned()))));
        }
    }

    #[test]
    fn one_that_died_has_no_outcome_and_takes_no_job() {
        let worker = Worker::spawn("dies", |n: u32| assert_eq!(n, 0, "expected")).unwrap();
        worker.give(0);
        assert_eq!(worker.outcome(), Some(()));
        for _ in 0..3 {
            worker.give(1);
            assert_eq!(worker.outcome(), None);
        }
    }

    #[test]
    fn dropping_it_waits_for_its_job() {
        let done = Arc::new(AtomicBool::new(false));
        let seen = done.clone();
        let worker = Worker::spawn("sleeps", move |pause| {
            std::thread::sleep(pause);
            seen.store(true, Ordering::Relaxed);
        });
        let worker = worker.unwrap();
        worker.give(Duration::from_millis(20));
        drop(worker);
        assert!(done.load(Ordering::Relaxed));
    }
}
