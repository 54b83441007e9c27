//! Times of GPU events on the host's clock.
//!
//! The driver reports the time between two events, by the GPU's own clock. It does not report where the origin of that clock lies
//! on the host's. The host knows two bounds of every event: it was after the call that recorded it had started, and before a wait
//! for it returned. The origin is chosen so that all bounds hold. Then no event is before an operation of the host that had ended
//! when the event was recorded, and none is after an operation that started when the event had been waited for:
//!
//! ```text
//! host   ──┤ operation ├─ record event ─┬──────────────── wait ──┬─┤ operation ├──
//! GPU                                   └─ start ─ kernel ─ end ─┘
//! ```
//!
//! Of all such origins the earliest is taken: the event with the shortest delay is at the start of its call. The segment between
//! two waits is moved only as far as its own bounds require, which keeps the durations in it. If the two clocks disagree within a
//! segment by more than the bounds leave room for, events are moved to their own bounds.

use std::time::{Duration, Instant};

use super::Event;

/// The events of a pass, and what the host knows of each.
#[derive(Default)]
pub(super) struct Timeline {
    events: Vec<Known>,
    /// When the host had waited for the stream that computes. Each wait ends a segment.
    waits: Vec<Instant>,
    /// Time of each event, once the pass has ended.
    times: Vec<Instant>,
}

/// What the host knows of an event.
#[derive(Clone, Copy)]
struct Known {
    /// Before the call that recorded it; unset while it is only reserved.
    issued: Option<Instant>,
    /// Waits before that call.
    segment: usize,
    /// Whether the wait that ends its segment covers it: it is on the stream that computes.
    is_awaited: bool,
}

impl Timeline {
    /// Forgets all events.
    pub(super) fn clear(&mut self) {
        self.events.clear();
        self.waits.clear();
        self.times.clear();
    }

    /// Number of events.
    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    /// An event that is to be recorded later.
    pub(super) fn reserve(&mut self) -> Event {
        self.events.push(Known {
            issued: None,
            segment: 0,
            is_awaited: false,
        });
        Event(self.events.len() - 1)
    }

    /// `event` is recorded by a call that starts at `at`, on the stream that computes if `is_awaited`.
    pub(super) fn issue(&mut self, event: Event, at: Instant, is_awaited: bool) {
        self.events[event.0] = Known {
            issued: Some(at),
            segment: self.waits.len(),
            is_awaited,
        };
    }

    /// A wait for the stream that computes returned at `at`.
    pub(super) fn waited(&mut self, at: Instant) {
        self.waits.push(at);
    }

    /// Finds the times of all events. The last of them were waited for, on every stream, at `end`; `elapsed` returns the GPU's time
    /// from the first event to another.
    ///
    /// # Errors
    /// What `elapsed` returns.
    pub(super) fn resolve<E>(
        &mut self,
        end: Instant,
        elapsed: impl Fn(Event) -> Result<Duration, E>,
    ) -> Result<(), E> {
        self.times.clear();
        let Some(start) = self.events.first().and_then(|first| first.issued) else {
            return Ok(());
        };
        let host = |at: Instant| at.saturating_duration_since(start).as_nanos() as i64;
        // Host and GPU time of every event, from the first one on; unset if it was never recorded.
        let mut both = Vec::with_capacity(self.events.len());
        for (at, known) in self.events.iter().enumerate() {
            both.push(match known.issued {
                None => None,
                Some(issued) if at == 0 => Some((host(issued), 0)),
                Some(issued) => Some((host(issued), elapsed(Event(at))?.as_nanos() as i64)),
            });
        }
        let origins = both.iter().flatten().map(|(issued, gpu)| issued - gpu);
        let earliest = origins.max().unwrap_or(0);

        let end = host(end);
        let seen = |segment: usize| self.waits.get(segment).map_or(end, |&at| host(at));
        let mut bounds = vec![(i64::MIN, i64::MAX); self.waits.len() + 1];
        for (known, both) in self.events.iter().zip(&both) {
            if let (true, Some((issued, gpu))) = (known.is_awaited, both) {
                let (low, high) = &mut bounds[known.segment];
                *low = (*low).max(issued - gpu);
                *high = (*high).min(seen(known.segment) - gpu);
            }
        }
        self.times
            .extend(self.events.iter().zip(&both).map(|(known, both)| {
                let Some((issued, gpu)) = *both else {
                    return start;
                };
                let (low, high) = bounds[known.segment];
                let last = if known.is_awaited {
                    seen(known.segment)
                } else {
                    end
                };
                let at = earliest.min(high).max(low) + gpu;
                start + Duration::from_nanos(at.max(issued).min(last).max(0) as u64)
            }));
        Ok(())
    }

    /// When an event was, once the times were found. One that was never recorded is at the start of the pass.
    pub(super) fn time(&self, event: Event) -> Option<Instant> {
        self.times.get(event.0).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events of a pass as the host issued them and as the GPU timed them, µs.
    struct TimedPass {
        start: Instant,
        timeline: Timeline,
        gpu: Vec<u64>,
    }

    impl TimedPass {
        fn new() -> TimedPass {
            TimedPass {
                start: Instant::now(),
                timeline: Timeline::default(),
                gpu: Vec::new(),
            }
        }

        fn at(&self, us: u64) -> Instant {
            self.start + Duration::from_micros(us)
        }

        /// An event on the stream that computes, or on another; the GPU's clock is at `gpu`.
        fn event(&mut self, issued: u64, gpu: u64, is_awaited: bool) -> Event {
            let event = self.timeline.reserve();
            let at = self.at(issued);
            self.timeline.issue(event, at, is_awaited);
            self.gpu.push(gpu);
            event
        }

        fn waited(&mut self, us: u64) {
            self.timeline.waited(self.at(us));
        }

        /// Times of all events, µs.
        fn resolve(mut self, end: u64) -> Vec<u64> {
            let (end, gpu) = (self.at(end), self.gpu.clone());
            let elapsed = |event: Event| -> Result<Duration, ()> {
                Ok(Duration::from_micros(gpu[event.0] - gpu[0]))
            };
            self.timeline.resolve(end, elapsed).unwrap();
            let times = (0..self.gpu.len()).map(|i| self.timeline.time(Event(i)).unwrap());
            times
                .map(|at| (at - self.start).as_micros() as u64)
                .collect()
        }
    }

    #[test]
    fn event_with_the_shortest_delay_is_at_its_call() {
        let mut pass = TimedPass::new();
        // 8 µs to the GPU, then 3, then behind a kernel of 100 µs.
        pass.event(0, 1008, true);
        pass.event(20, 1023, true);
        pass.event(22, 1123, true);
        assert_eq!(pass.resolve(130), [5, 20, 120]);
    }

    #[test]
    fn event_after_host_work_is_not_before_it() {
        let mut pass = TimedPass::new();
        // The first event took 30 µs to the GPU. Laid onto its own call, the second would be at 170, before the call.
        pass.event(0, 5030, true);
        pass.event(200, 5200, true);
        assert_eq!(pass.resolve(300), [30, 200]);
    }

    #[test]
    fn event_that_was_waited_for_is_not_after_the_wait() {
        let mut pass = TimedPass::new();
        pass.event(0, 1000, true);
        // The GPU's clock is 5 % fast, far more than any: the wait at 1010 shows it.
        pass.event(0, 2050, true);
        pass.waited(1010);
        pass.event(1020, 2072, true);
        pass.event(1020, 2172, true);
        pass.waited(1130);
        let times = pass.resolve(1140);
        assert_eq!(times[..2], [0, 1010]);
        // In the next segment durations are as measured, and both bounds hold.
        assert_eq!(times[2..], [1030, 1130]);
    }

    #[test]
    fn drift_between_waits_moves_segments_and_keeps_durations() {
        let mut pass = TimedPass::new();
        let (mut host, mut gpu) = (0, 0);
        for _ in 0..100 {
            // Issue, 5 µs to the GPU, a kernel of 1000 µs, 5 µs back; the GPU's clock is 0.1 % slow.
            pass.event(host, gpu + 5, true);
            pass.event(host, gpu + 1004, true);
            pass.waited(host + 1010);
            host += 1010;
            gpu += 1009;
        }
        let times = pass.resolve(host);
        assert!(times.is_sorted(), "{times:?}");
        for (i, span) in times.chunks(2).enumerate() {
            assert_eq!(span[1] - span[0], 999, "kernel {i} of {times:?}");
            let start = 1010 * i as u64;
            assert!(span[0] >= start && span[1] <= start + 1010, "{times:?}");
        }
    }

    #[test]
    fn other_stream_is_bounded_by_the_end_of_the_pass() {
        let mut pass = TimedPass::new();
        pass.event(0, 100, true);
        // A copy that ends after the wait for the stream that computes.
        pass.event(10, 110, false);
        pass.event(10, 400, false);
        pass.event(20, 150, true);
        pass.waited(60);
        assert_eq!(pass.resolve(500), [0, 10, 300, 50]);
    }

    #[test]
    fn reserved_event_that_was_never_recorded_is_ignored() {
        let mut pass = TimedPass::new();
        pass.event(0, 0, true);
        let reserved = pass.timeline.reserve();
        pass.gpu.push(77_777_777);
        pass.event(10, 10, true);
        assert_eq!(reserved, Event(1));
        assert_eq!(pass.resolve(20), [0, 0, 10]);
    }
}
