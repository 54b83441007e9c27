//! The queue of requests and commands between the handles and the thread of the scheduler.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use moe_engine::BatchSession;
use tokio::sync::mpsc::UnboundedSender;

use crate::generation::{Event, GenerationRequest};

/// A callback for the session.
pub(super) type Command = Box<dyn FnOnce(&mut dyn BatchSession) + Send>;

/// A request that waits for a slot.
pub(super) struct Queued {
    pub request: GenerationRequest,
    pub events: UnboundedSender<Event>,
    pub submitted: Instant,
}

impl Queued {
    /// Whether the client is gone or the deadline has passed.
    fn is_over(&self, now: Instant) -> bool {
        self.events.is_closed()
            || self
                .request
                .deadline
                .is_some_and(|deadline| deadline <= now)
    }
}

/// Why a request or command is not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Rejected {
    Full,
    Stopping,
}

/// What the scheduler has to do.
#[derive(Default)]
pub(super) struct Work {
    pub commands: Vec<Command>,
    /// Requests that start now.
    pub started: Vec<Queued>,
    /// Requests whose client is gone or whose deadline has passed while they waited.
    pub over: Vec<Queued>,
}

/// Requests that wait, and the number of those that run.
pub(super) struct Queue {
    n_slots: usize,
    capacity: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Queued>,
    /// Requests that waited until their client was gone or their deadline had passed.
    over: Vec<Queued>,
    commands: Vec<Command>,
    n_running: usize,
    /// No request is accepted any more.
    is_closed: bool,
    /// The scheduler has ended: commands are not accepted either.
    has_ended: bool,
}

impl State {
    /// Moves requests from `waiting` to `over`.
    fn remove_over(&mut self) {
        let now = Instant::now();
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let (over, waiting) = waiting.partition(|queued| queued.is_over(now));
        self.waiting = waiting;
        self.over.extend(over);
    }
}

impl Queue {
    /// An empty queue. `capacity` is the maximum number of requests that wait while all slots are busy.
    pub fn new(n_slots: usize, capacity: usize) -> Queue {
        Queue {
            n_slots,
            capacity,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Locks the state. A thread that panicked leaves a valid state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers of slots, of running requests, of waiting requests, and the maximum of the waiting requests.
    pub fn numbers(&self) -> [usize; 4] {
        let state = self.lock();
        [
            self.n_slots,
            state.n_running,
            state.waiting.len(),
            self.capacity,
        ]
    }

    /// Adds a request.
    pub fn push(&self, queued: Queued) -> Result<(), Rejected> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(Rejected::Stopping);
        }
        let limit = self.n_slots.saturating_add(self.capacity);
        let is_full = |state: &State| state.waiting.len() + state.n_running >= limit;
        if is_full(&state) {
            // Between two passes, the scheduler has not noticed which clients are gone.
            state.remove_over();
        }
        if is_full(&state) {
            return Err(Rejected::Full);
        }
        state.waiting.push_back(queued);
        self.changed.notify_all();
        Ok(())
    }

    /// Adds a command.
    pub fn push_command(&self, command: Command) -> Result<(), Rejected> {
        let mut state = self.lock();
        if state.has_ended {
            return Err(Rejected::Stopping);
        }
        state.commands.push(command);
        self.changed.notify_all();
        Ok(())
    }

    /// Whether requests are accepted.
    pub fn is_accepting(&self) -> bool {
        !self.lock().is_closed
    }

    /// Rejects all later requests.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Returns the work before the next pass. Sleeps while nothing runs and nothing waits. Returns `None` after [`Queue::close`] when all
    /// requests have ended; from then on no command is accepted.
    pub fn take(&self) -> Option<Work> {
        let mut state = self.lock();
        loop {
            state.remove_over();
            let n_free = self.n_slots - state.n_running;
            let n_started = n_free.min(state.waiting.len());
            state.n_running += n_started;
            let work = Work {
                commands: std::mem::take(&mut state.commands),
                started: state.waiting.drain(..n_started).collect(),
                over: std::mem::take(&mut state.over),
            };
            if state.n_running > 0 || !work.over.is_empty() || !work.commands.is_empty() {
                return Some(work);
            }
            if state.is_closed {
                state.has_ended = true;
                return None;
            }
            let woken = self.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Notes that a request no longer runs.
    pub fn release(&self) {
        let mut state = self.lock();
        state.n_running = state.n_running.saturating_sub(1);
    }

    /// Ends the queue: nothing is accepted any more. Returns the requests that have not started.
    pub fn end(&self) -> Vec<Queued> {
        let mut state = self.lock();
        state.is_closed = true;
        state.has_ended = true;
        state.n_running = 0;
        state.commands.clear();
        let over = std::mem::take(&mut state.over);
        over.into_iter().chain(state.waiting.drain(..)).collect()
    }
}
