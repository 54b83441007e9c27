//! Events of a pass, and their times on the CPU clock. An event is the start of a kernel, or a CUDA event.

use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream};

use super::starts::KernelStarts;
use super::timeline::{GpuTime, Link, Stream, Timeline};
use super::{Error, Event, Gpu, Ptr, Result};

/// The events of a pass on all streams of one GPU.
#[derive(Default)]
pub(crate) struct EventClock {
    /// CUDA events, created once and recorded again in every pass. The first one is at the start of the pass.
    cuda_events: Vec<CudaEvent>,
    /// Number of CUDA events in this pass.
    n_cuda_events: usize,
    starts: KernelStarts,
    /// What measures each event.
    measures: Vec<Measure>,
    timeline: Timeline,
    /// The last event that is the start of a kernel.
    last_start: Option<Event>,
    /// The CUDA event right after the last start of the pass.
    end: Option<Event>,
    /// The event after the last copy from another GPU that the current operation reads.
    received: Option<Event>,
}

/// What measures the time of an event.
#[derive(Clone, Copy)]
enum Measure {
    /// A CUDA event, by its index.
    CudaEvent(usize),
    /// The start of a kernel, by its index in the starts of the pass.
    Start(usize),
}

impl EventClock {
    /// Removes all events, and records the first one of a pass on the compute stream, which is idle.
    ///
    /// # Errors
    /// As [`EventClock::record`].
    pub(super) fn restart(&mut self, gpu: &Gpu) -> Result<Event> {
        self.timeline.clear();
        self.starts.clear();
        self.measures.clear();
        self.n_cuda_events = 0;
        (self.received, self.last_start, self.end) = (None, None, None);
        // A start of a pass that failed.
        gpu.kernels().launches().store_start(Ptr::NULL);
        self.record(gpu, gpu.stream())
    }

    /// The start of the kernel that is launched next on the compute stream: the end of all work there so far. If no kernel has been
    /// launched since the last call, the result is the same event.
    ///
    /// # Errors
    /// Without memory for the start, as [`EventClock::record`].
    pub(super) fn next_start(&mut self, gpu: &Gpu) -> Result<Event> {
        let is_wanted = gpu.kernels().launches().stores_start();
        if let Some(event) = self.last_start.filter(|_| is_wanted) {
            return Ok(event);
        }
        self.store_next_start(gpu, Stream::Compute)
    }

    /// Makes the kernel that is launched next store its start. Without memory for it, records a CUDA event.
    fn store_next_start(&mut self, gpu: &Gpu, of: Stream) -> Result<Event> {
        let Some((slot, at)) = self.starts.reserve(gpu) else {
            let event = self.reserve(gpu)?;
            self.record_on(event, gpu.stream(), of)?;
            return Ok(event);
        };
        let event = self.timeline.reserve();
        self.measures.push(Measure::Start(slot));
        self.timeline.record(event, Instant::now(), of);
        gpu.kernels().launches().store_start(at);
        self.last_start = Some(event);
        Ok(event)
    }

    /// Records a CUDA event on `stream`.
    ///
    /// # Errors
    /// The driver cannot create or record it.
    pub(super) fn record(&mut self, gpu: &Gpu, stream: &CudaStream) -> Result<Event> {
        let event = self.reserve(gpu)?;
        self.record_reserved(event, gpu, stream)?;
        Ok(event)
    }

    /// Returns a CUDA event that is recorded later, or never.
    ///
    /// # Errors
    /// The driver cannot create it.
    pub(super) fn reserve(&mut self, gpu: &Gpu) -> Result<Event> {
        if self.n_cuda_events == self.cuda_events.len() {
            self.cuda_events.push(gpu.event()?);
        }
        self.measures.push(Measure::CudaEvent(self.n_cuda_events));
        self.n_cuda_events += 1;
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
        if let Some(cuda_event) = self.cuda_event(event) {
            let recorded = cuda_event.record(stream);
            recorded.map_err(|source| Error::driver("recording an event", source))?;
            self.timeline.record(event, start, of);
        }
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
        let event = self.store_next_start(gpu, Stream::AfterCopyFrom(from))?;
        gpu.end_operation();
        self.received = Some(event);
        Ok(())
    }

    /// The event after which the current operation had everything it reads, if it reads copies from other GPUs.
    pub(super) fn received(&self) -> Option<Event> {
        self.received
    }

    /// The CUDA event that measures an event; `None` for the start of a kernel.
    pub(super) fn cuda_event(&self, event: Event) -> Option<&CudaEvent> {
        match self.measures.get(event.0)? {
            Measure::CudaEvent(index) => self.cuda_events.get(*index),
            Measure::Start(_) => None,
        }
    }

    /// A wait for the compute stream has just returned.
    pub(super) fn waited(&mut self) {
        self.timeline.waited(Instant::now());
    }

    /// Ends the work of the pass on the compute stream: starts the copy of the starts of its kernels, unless all so far are copied.
    ///
    /// # Errors
    /// The copy cannot be started, or as [`EventClock::record`].
    pub(super) fn copy_starts(&mut self, gpu: &Gpu) -> Result<()> {
        if self.starts.are_copied() {
            return Ok(());
        }
        self.next_start(gpu)?;
        gpu.end_operation();
        self.end = Some(self.record(gpu, gpu.stream())?);
        self.starts.begin_copy(gpu)
    }

    /// Ends the pass, after a wait for all streams: reads the GPU times of its events.
    ///
    /// # Errors
    /// The work of the GPU failed.
    pub(super) fn end(&mut self) -> Result<()> {
        let end = Instant::now();
        let since_first = |index: usize| -> Result<Duration> {
            let ms = self.cuda_events[0].elapsed_ms(&self.cuda_events[index]);
            let ms = ms.map_err(|source| Error::driver("reading the time of an event", source))?;
            Ok(Duration::from_nanos((f64::from(ms).max(0.0) * 1e6) as u64))
        };
        let time = |event: Event| -> Result<Option<GpuTime>> {
            Ok(match self.measures[event.0] {
                Measure::CudaEvent(index) => Some(GpuTime::SinceFirst(since_first(index)?)),
                Measure::Start(slot) => {
                    let start = self.starts.ns(slot);
                    start.map(|ns| GpuTime::Timer(Duration::from_nanos(ns)))
                }
            })
        };
        // The last kernel of the pass only stores its start, about a microsecond before the event that follows it.
        let link = match (self.last_start, self.end) {
            (Some(last), Some(end)) => match (time(last)?, time(end)?) {
                (Some(GpuTime::Timer(timer)), Some(GpuTime::SinceFirst(since_first))) => {
                    Some(Link { timer, since_first })
                }
                _ => None,
            },
            _ => None,
        };
        self.timeline.end(end, link, time)
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
