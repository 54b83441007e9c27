//! Events of a pass, and their times on the CPU clock.

use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream};

use super::timeline::{Stream, Timeline};
use super::{Error, Event, Gpu, Result};

/// The events of a pass on all streams of one GPU. CUDA events are created once and recorded again in every pass.
#[derive(Default)]
pub(crate) struct EventClock {
    events: Vec<CudaEvent>,
    timeline: Timeline,
    /// The event after the last copy from another GPU that the current operation reads.
    received: Option<Event>,
}

impl EventClock {
    /// Removes all events, and records the first one of a pass on the compute stream, which is idle.
    ///
    /// # Errors
    /// As [`EventClock::record`].
    pub(super) fn restart(&mut self, gpu: &Gpu) -> Result<Event> {
        self.timeline.clear();
        self.received = None;
        self.record(gpu, gpu.stream())
    }

    /// Records an event on `stream`.
    ///
    /// # Errors
    /// The driver cannot create or record it.
    pub(super) fn record(&mut self, gpu: &Gpu, stream: &CudaStream) -> Result<Event> {
        let event = self.reserve(gpu)?;
        self.record_reserved(event, gpu, stream)?;
        Ok(event)
    }

    /// Returns an event that is recorded later, or never.
    ///
    /// # Errors
    /// The driver cannot create it.
    pub(super) fn reserve(&mut self, gpu: &Gpu) -> Result<Event> {
        if self.timeline.len() == self.events.len() {
            self.events.push(gpu.event()?);
        }
        Ok(self.timeline.reserve())
    }

    /// Records a [reserved](EventClock::reserve) event on `stream`.
    ///
    /// # Errors
    /// The driver cannot record it.
    pub(super) fn record_reserved(
        &mut self,
        event: Event,
        gpu: &Gpu,
        stream: &CudaStream,
    ) -> Result<()> {
        let computes = stream.cu_stream() == gpu.stream().cu_stream();
        let of = if computes {
            Stream::Compute
        } else {
            Stream::Transfer
        };
        self.record_on(event, stream, of)
    }

    fn record_on(&mut self, event: Event, stream: &CudaStream, of: Stream) -> Result<()> {
        let start = Instant::now();
        let recorded = self.event(event).record(stream);
        recorded.map_err(|source| Error::driver("recording an event", source))?;
        self.timeline.record(event, start, of);
        Ok(())
    }

    /// Starts an operation, which has not received anything yet.
    pub(super) fn start_operation(&mut self) {
        self.received = None;
    }

    /// Records an event on the compute stream right after a copy from the GPU with index `from`, for the current operation.
    ///
    /// # Errors
    /// As [`EventClock::record`].
    pub(super) fn receive(&mut self, gpu: &Gpu, from: usize) -> Result<()> {
        let event = self.reserve(gpu)?;
        self.record_on(event, gpu.stream(), Stream::AfterCopyFrom(from))?;
        self.received = Some(event);
        Ok(())
    }

    /// The event after which the current operation had everything it reads, if it reads copies from other GPUs.
    pub(super) fn received(&self) -> Option<Event> {
        self.received
    }

    /// The CUDA event.
    pub(super) fn event(&self, event: Event) -> &CudaEvent {
        &self.events[event.0]
    }

    /// A wait for the compute stream has just returned.
    pub(super) fn waited(&mut self) {
        self.timeline.waited(Instant::now());
    }

    /// Ends the pass, after a wait for all streams: reads the GPU times of its events.
    ///
    /// # Errors
    /// The work of the GPU failed.
    pub(super) fn end(&mut self) -> Result<()> {
        let EventClock {
            events, timeline, ..
        } = self;
        timeline.end(Instant::now(), |event| {
            let since = events[0].elapsed_ms(&events[event.0]);
            let since =
                since.map_err(|source| Error::driver("reading the time of an event", source))?;
            Ok(Duration::from_nanos(
                (f64::from(since).max(0.0) * 1e6) as u64,
            ))
        })
    }

    /// Finds the CPU times of the events of all GPUs, in the order of the list, once the pass has [ended](EventClock::end) on
    /// each.
    pub(super) fn find_times<'c>(clocks: impl Iterator<Item = &'c mut EventClock>) {
        let mut timelines: Vec<&mut Timeline> = clocks.map(|clock| &mut clock.timeline).collect();
        Timeline::find_times(&mut timelines);
    }

    /// CPU time of an event.
    ///
    /// # Errors
    /// The times of the pass have not been [found](EventClock::find_times).
    pub(super) fn time(&self, event: Event) -> Result<Instant> {
        self.timeline.time(event).ok_or(Error::PassNotEnded)
    }
}
