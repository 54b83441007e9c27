//! The clock of a trace.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A monotonic clock in nanoseconds, which starts at the Unix time of its creation.
pub struct TraceClock {
    origin: Instant,
    origin_ns: u64,
}

impl TraceClock {
    /// A clock that starts now.
    pub fn new() -> TraceClock {
        let unix = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        // A timestamp of 0 would end the trace.
        TraceClock {
            origin: Instant::now(),
            origin_ns: (unix.as_nanos() as u64).max(1),
        }
    }

    /// The instant at which the clock was created. Its time on the clock is the Unix time.
    pub fn origin(&self) -> Instant {
        self.origin
    }

    /// The time of an instant on this clock, in nanoseconds.
    pub fn ns(&self, at: Instant) -> u64 {
        self.origin_ns + self.since_origin_ns(at)
    }

    /// Nanoseconds from the clock's origin to an instant.
    pub fn since_origin_ns(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.origin).as_nanos() as u64
    }
}

impl Default for TraceClock {
    fn default() -> Self {
        TraceClock::new()
    }
}
