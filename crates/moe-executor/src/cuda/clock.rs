//! Events of a pass, and their times on the host's clock.

use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream};

use super::timeline::Timeline;
use super::{Error, Event, Gpu, Result};

/// The events of a pass, on any streams of one GPU. They are created once and recorded again in every pass.
#[derive(Default)]
pub(crate) struct EventClock {
    events: Vec<CudaEvent>,
    timeline: Timeline,
    /// The last event on the stream that computes.
    last: Option<Event>,
    /// The event after the last copy from another GPU that the operation under way waited for.
    received: Option<Event>,
}

impl EventClock {
    /// Forgets all events and records the first one, on the stream that computes, which is idle.
    ///
    /// # Errors
    /// As [`EventClock::record`].
    pub(super) fn restart(&mut self, gpu: &Gpu) -> Result<()> {
        self.timeline.clear();
        (self.last, self.received) = (None, None);
        self.record(gpu, gpu.stream()).map(|_| ())
    }

    /// Records an event on `stream`.
    ///
    /// # Errors
    /// It cannot be created or recorded.
    pub(super) fn record(&mut self, gpu: &Gpu, stream: &CudaStream) -> Result<Event> {
        let event = self.reserve(gpu)?;
        self.record_reserved(event, gpu, stream)?;
        Ok(event)
    }

    /// An event that is to be recorded later.
    ///
    /// # Errors
    /// It cannot be created.
    pub(super) fn reserve(&mut self, gpu: &Gpu) -> Result<Event> {
        if self.timeline.len() == self.events.len() {
            self.events.push(gpu.event()?);
        }
        Ok(self.timeline.reserve())
    }

    /// Records a [reserved](EventClock::reserve) event on `stream`.
    ///
    /// # Errors
    /// It cannot be recorded.
    pub(super) fn record_reserved(
        &mut self,
        event: Event,
        gpu: &Gpu,
        stream: &CudaStream,
    ) -> Result<()> {
        let issued = Instant::now();
        let recorded = self.event(event).record(stream);
        recorded.map_err(|source| Error::driver("an event", source))?;
        let computes = stream.cu_stream() == gpu.stream().cu_stream();
        self.timeline.issue(event, issued, computes);
        if computes {
            self.last = Some(event);
        }
        Ok(())
    }

    /// An operation starts: what was received before is not its own.
    pub(super) fn start_operation(&mut self) {
        self.received = None;
    }

    /// The stream that computes has been given a copy from another GPU for the operation under way.
    ///
    /// # Errors
    /// As [`EventClock::record`].
    pub(super) fn receive(&mut self, gpu: &Gpu) -> Result<()> {
        self.received = Some(self.record(gpu, gpu.stream())?);
        Ok(())
    }

    /// The event at which the operation under way had all that it reads, if it waited for another GPU.
    pub(super) fn received(&self) -> Option<Event> {
        self.received
    }

    /// The last event on the stream that computes.
    pub(super) fn last(&self) -> Option<Event> {
        self.last
    }

    /// The driver's event.
    pub(super) fn event(&self, event: Event) -> &CudaEvent {
        &self.events[event.0]
    }

    /// The host has waited for the stream that computes.
    pub(super) fn waited(&mut self) {
        self.timeline.waited(Instant::now());
    }

    /// Finds the times of all events; the host has waited for all streams.
    ///
    /// # Errors
    /// The GPU's work failed.
    pub(super) fn finish(&mut self) -> Result<()> {
        let EventClock {
            events, timeline, ..
        } = self;
        timeline.resolve(Instant::now(), |event| {
            let since = events[0].elapsed_ms(&events[event.0]);
            let since = since.map_err(|source| Error::driver("an event's time", source))?;
            Ok(Duration::from_nanos(
                (f64::from(since).max(0.0) * 1e6) as u64,
            ))
        })
    }

    /// When an event was; see [`EventClock::finish`].
    ///
    /// # Errors
    /// The pass has not ended.
    pub(super) fn time(&self, event: Event) -> Result<Instant> {
        self.timeline.time(event).ok_or(Error::PassNotEnded)
    }
}
