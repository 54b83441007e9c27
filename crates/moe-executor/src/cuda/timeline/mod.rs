//! Times of GPU events on the CPU clock.
//!
//! Events are starts of kernels and CUDA events, whose times are known by the clock of their GPU. The offset between this clock
//! and the CPU clock is not known. The CPU knows two limits of every event: it was after the start of the call that recorded it, and
//! before the return of a wait that covers it. The offset is chosen so that all limits hold. Then no event is before a CPU
//! operation that had ended when the event was recorded, and none is after a CPU operation that started when the wait had
//! returned:
//!
//! ```text
//! CPU    ──┤ operation ├─ record event ─┬──────────────── wait ──┬─┤ operation ├──
//! GPU                                   └─ start ─ kernel ─ end ─┘
//! ```
//!
//! The earliest such offset is used: the event with the shortest launch latency is at the start of its call. Copies between GPUs
//! limit the offsets of both clocks, so the times of all GPUs are found together ([`align`]).

mod align;

use std::time::{Duration, Instant};

use super::Event;
pub(super) use align::Stream;
use align::{GpuPass, Recorded};

/// The events of one GPU in a pass.
#[derive(Default)]
pub(super) struct Timeline {
    /// `None` while an event is only reserved.
    events: Vec<Option<Call>>,
    /// When the waits for the compute stream returned. Each wait ends a segment.
    waits: Vec<Instant>,
    /// Measurements of the GPU; `None` until the pass has ended.
    measured: Option<Measured>,
    /// CPU time of each event; empty until [`Timeline::find_times`].
    times: Vec<Instant>,
}

/// The call that recorded an event.
#[derive(Clone, Copy)]
struct Call {
    start: Instant,
    /// Number of waits before the call.
    segment: usize,
    stream: Stream,
}

/// The GPU time of an event, as it was measured.
#[derive(Clone, Copy)]
pub(super) enum GpuTime {
    /// Of a CUDA event: since the first event of the pass.
    SinceFirst(Duration),
    /// Of the start of a kernel: on the global timer of the GPU.
    Timer(Duration),
}

/// A time that is known on both clocks of a GPU: at most a few microseconds after `timer`, the driver recorded a CUDA event.
#[derive(Clone, Copy)]
pub(super) struct Link {
    /// On the global timer.
    pub timer: Duration,
    /// Of the CUDA event, since the first event of the pass.
    pub since_first: Duration,
}

/// End and GPU times of a pass that has ended.
struct Measured {
    /// When the wait for all streams returned.
    end: Instant,
    /// GPU time of each event since the first one; zero if it was never recorded.
    since_first: Vec<Duration>,
}

impl Timeline {
    /// Removes all events.
    pub(super) fn clear(&mut self) {
        self.events.clear();
        self.waits.clear();
        self.measured = None;
        self.times.clear();
    }

    /// Returns an event that is recorded later, or never.
    pub(super) fn reserve(&mut self) -> Event {
        self.events.push(None);
        Event(self.events.len() - 1)
    }

    /// A call that started at `start` recorded `event` on `stream`.
    pub(super) fn record(&mut self, event: Event, start: Instant, stream: Stream) {
        self.events[event.0] = Some(Call {
            start,
            segment: self.waits.len(),
            stream,
        });
    }

    /// A wait for the compute stream returned at `at`.
    pub(super) fn waited(&mut self, at: Instant) {
        self.waits.push(at);
    }

    /// Ends the pass: a wait for all streams returned at `end`. `time` returns the GPU time of an event; `None` if it did not
    /// happen. `link` relates the two clocks of the GPU; without it, the global timer starts at the first event.
    ///
    /// # Errors
    /// Those of `time`.
    pub(super) fn end<E>(
        &mut self,
        end: Instant,
        link: Option<Link>,
        time: impl Fn(Event) -> Result<Option<GpuTime>, E>,
    ) -> Result<(), E> {
        let mut times = Vec::with_capacity(self.events.len());
        for (at, call) in self.events.iter_mut().enumerate() {
            let time = match call {
                Some(_) if at > 0 => time(Event(at))?,
                _ => Some(GpuTime::SinceFirst(Duration::ZERO)),
            };
            if time.is_none() {
                *call = None;
            }
            times.push(time.unwrap_or(GpuTime::SinceFirst(Duration::ZERO)));
        }
        let link = link.map(|link| self.corrected(link, &times, end));
        let since_first = times.into_iter().map(|time| match (time, link) {
            (GpuTime::SinceFirst(since_first), _) => since_first,
            (GpuTime::Timer(at), None) => at,
            (GpuTime::Timer(at), Some(link)) => (link.since_first + at).saturating_sub(link.timer),
        });
        self.measured = Some(Measured {
            end,
            since_first: since_first.collect(),
        });
        Ok(())
    }

    /// The link without the time that the driver took to record its CUDA event, as far as it is known: between the first event and
    /// the start of a kernel is less time than between the call of the former and the return of the wait for the latter.
    fn corrected(&self, link: Link, times: &[GpuTime], end: Instant) -> Link {
        let Some(Some(first)) = self.events.first() else {
            return link;
        };
        let limits = self.events.iter().zip(times).filter_map(|(call, time)| {
            let (Some(call), GpuTime::Timer(at)) = (call, time) else {
                return None;
            };
            let wait = self.waits.get(call.segment).copied().unwrap_or(end);
            let since_first = wait.saturating_duration_since(first.start);
            Some((since_first + link.timer).saturating_sub(*at))
        });
        let since_first = limits.fold(link.since_first, Duration::min);
        Link {
            since_first,
            ..link
        }
    }

    /// Finds the times of all events of a pass that has [ended](Timeline::end) on all GPUs. The place of a timeline is the index
    /// that [`Stream::AfterCopyFrom`] refers to.
    pub(super) fn find_times(timelines: &mut [&mut Timeline]) {
        let calls = timelines.iter().flat_map(|timeline| &timeline.events);
        let Some(origin) = calls.flatten().map(|call| call.start).min() else {
            return;
        };
        let passes: Vec<GpuPass> = timelines.iter().map(|one| one.pass(origin)).collect();
        for (timeline, times) in timelines.iter_mut().zip(align::align(&passes)) {
            let first = times.iter().flatten().next().copied().unwrap_or(0);
            let times = times.into_iter().map(|at| at.unwrap_or(first).max(0));
            let times = times.map(|at| origin + Duration::from_nanos(at as u64));
            timeline.times = times.collect();
        }
    }

    /// The measurements as input of [`align`](align::align). CPU times are in ns since `origin`.
    fn pass(&self, origin: Instant) -> GpuPass {
        let Some(measured) = &self.measured else {
            return GpuPass::default();
        };
        let cpu = |at: Instant| at.saturating_duration_since(origin).as_nanos() as i64;
        let events = self.events.iter().zip(&measured.since_first);
        let events = events.map(|(call, since_first)| {
            call.map(|call| Recorded {
                issued: cpu(call.start),
                gpu: since_first.as_nanos() as i64,
                segment: call.segment,
                stream: call.stream,
            })
        });
        GpuPass {
            events: events.collect(),
            waits: self.waits.iter().copied().map(cpu).collect(),
            end: cpu(measured.end),
        }
    }

    /// Time of an event; `None` until [`Timeline::find_times`]. An event that was never recorded has the time of the first one.
    pub(super) fn time(&self, event: Event) -> Option<Instant> {
        self.times.get(event.0).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events of a pass with the times of their calls and the GPU times, µs.
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

        /// Records an event on the compute stream by a call at `start`; the GPU clock is at `gpu`.
        fn event(&mut self, start: u64, gpu: u64) -> Event {
            self.event_on(Stream::Compute, start, gpu)
        }

        fn event_on(&mut self, stream: Stream, start: u64, gpu: u64) -> Event {
            let event = self.timeline.reserve();
            let at = self.at(start);
            self.timeline.record(event, at, stream);
            self.gpu.push(gpu);
            event
        }

        fn waited(&mut self, us: u64) {
            self.timeline.waited(self.at(us));
        }

        /// Ends the pass. Returns the times of all events, µs.
        fn resolve(mut self, end: u64) -> Vec<u64> {
            let (end, gpu) = (self.at(end), self.gpu.clone());
            let time = |event: Event| -> Result<Option<GpuTime>, ()> {
                let since_first = Duration::from_micros(gpu[event.0] - gpu[0]);
                Ok(Some(GpuTime::SinceFirst(since_first)))
            };
            self.timeline.end(end, None, time).unwrap();
            Timeline::find_times(&mut [&mut self.timeline]);
            let times = (0..self.gpu.len()).map(|i| self.timeline.time(Event(i)).unwrap());
            times
                .map(|at| (at - self.start).as_micros() as u64)
                .collect()
        }
    }

    #[test]
    fn event_with_the_shortest_latency_is_at_its_call() {
        let mut pass = TimedPass::new();
        // Latencies of 8 µs and 3 µs; then the event follows a kernel of 100 µs.
        pass.event(0, 1008);
        pass.event(20, 1023);
        pass.event(22, 1123);
        assert_eq!(pass.resolve(130), [5, 20, 120]);
    }

    #[test]
    fn event_is_not_before_its_call() {
        let mut pass = TimedPass::new();
        // The first event has a latency of 30 µs. If it were placed at its call, the second event would be at 170, before its call.
        pass.event(0, 5030);
        pass.event(200, 5200);
        assert_eq!(pass.resolve(300), [30, 200]);
    }

    #[test]
    fn event_is_not_after_the_wait_that_covers_it() {
        let mut pass = TimedPass::new();
        pass.event(0, 1000);
        // The GPU clock is 5 % fast, far more than real clocks: the wait at 1010 shows it.
        pass.event(0, 2050);
        pass.waited(1010);
        pass.event(1020, 2072);
        pass.event(1020, 2172);
        pass.waited(1130);
        let times = pass.resolve(1140);
        assert_eq!(times[..2], [0, 1010]);
        // In the next segment, durations are as measured, and both limits hold.
        assert_eq!(times[2..], [1030, 1130]);
    }

    #[test]
    fn drift_changes_offsets_between_waits_and_keeps_durations() {
        let mut pass = TimedPass::new();
        let (mut cpu, mut gpu) = (0, 0);
        for _ in 0..100 {
            // 5 µs from the call to the GPU, a kernel of 1000 µs, 5 µs to the return of the wait. The GPU clock is 0.1 % slow.
            pass.event(cpu, gpu + 5);
            pass.event(cpu, gpu + 1004);
            pass.waited(cpu + 1010);
            cpu += 1010;
            gpu += 1009;
        }
        let times = pass.resolve(cpu);
        assert!(times.is_sorted(), "{times:?}");
        for (i, span) in times.chunks(2).enumerate() {
            assert_eq!(span[1] - span[0], 999, "kernel {i} of {times:?}");
            let start = 1010 * i as u64;
            assert!(span[0] >= start && span[1] <= start + 1010, "{times:?}");
        }
    }

    #[test]
    fn transfer_stream_is_limited_by_the_end_of_the_pass() {
        let mut pass = TimedPass::new();
        pass.event(0, 100);
        // A copy that ends after the wait for the compute stream.
        pass.event_on(Stream::Transfer, 10, 110);
        pass.event_on(Stream::Transfer, 10, 400);
        pass.event(20, 150);
        pass.waited(60);
        assert_eq!(pass.resolve(500), [0, 10, 300, 50]);
    }

    #[test]
    fn late_event_at_the_end_moves_no_kernel_after_its_wait() {
        let us = Duration::from_micros;
        let mut pass = TimedPass::new();
        // The first event is at 0. Two kernels start at 10 and 14 µs, and the CPU has waited for them at 20 µs.
        pass.event(0, 0);
        pass.event(2, 5010);
        pass.event(3, 5014);
        pass.waited(20);
        pass.event(30, 5040);
        let gpu = pass.gpu.clone();
        let times = |event: Event| -> Result<Option<GpuTime>, ()> {
            Ok(Some(GpuTime::Timer(us(gpu[event.0]))))
        };
        // The driver recorded the event after the last kernel, which started at 40 µs, 500 µs late.
        let link = Link {
            timer: us(5040),
            since_first: us(540),
        };
        let end = pass.at(600);
        pass.timeline.end(end, Some(link), times).unwrap();
        Timeline::find_times(&mut [&mut pass.timeline]);
        let start = pass.start;
        let at = |i| (pass.timeline.time(Event(i)).unwrap() - start).as_micros();
        assert_eq!([0, 1, 2, 3].map(at), [0, 16, 20, 46]);
    }

    #[test]
    fn reserved_event_that_was_never_recorded_is_ignored() {
        let mut pass = TimedPass::new();
        pass.event(0, 0);
        let reserved = pass.timeline.reserve();
        pass.gpu.push(77_777_777);
        pass.event(10, 10);
        assert_eq!(reserved, Event(1));
        assert_eq!(pass.resolve(20), [0, 0, 10]);
    }
}
