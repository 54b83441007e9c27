//! Counters that several threads use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Counters;

/// Handle of [`Counters`] that several threads share: one thread computes, another one reads a report meanwhile. Clones
/// refer to the same counters.
#[derive(Debug, Clone)]
pub struct SharedCounters(Arc<Mutex<Counters>>);

impl SharedCounters {
    /// Shares counters.
    pub fn new(counters: Counters) -> SharedCounters {
        SharedCounters(Arc::new(Mutex::new(counters)))
    }

    /// Locks the counters. A report between two calls contains both of them completely or not at all. A thread that panicked
    /// while it counted leaves valid counters.
    pub fn lock(&self) -> MutexGuard<'_, Counters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
