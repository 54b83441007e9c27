//! Times of work on the GPU, told by events.

use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream};

use super::{Error, Gpu, Result};

/// A moment on a stream of the GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark(pub(super) usize);

/// The moments of a pass, on any streams of one GPU. Events are made once and recorded anew in every pass.
#[derive(Default)]
pub(super) struct Clock {
    events: Vec<CudaEvent>,
    used: usize,
    /// When the first was recorded, with nothing before it on its stream.
    origin: Option<Instant>,
}

impl Clock {
    /// Forgets all moments and begins with one on `stream`, on which nothing is under way.
    ///
    /// # Errors
    /// As [`Clock::mark`].
    pub(super) fn restart(&mut self, gpu: &Gpu, stream: &CudaStream) -> Result<()> {
        self.used = 0;
        self.mark(gpu, stream)?;
        self.origin = Some(Instant::now());
        Ok(())
    }

    /// The moment that `stream` comes to next.
    ///
    /// # Errors
    /// An event cannot be made or recorded.
    pub(super) fn mark(&mut self, gpu: &Gpu, stream: &CudaStream) -> Result<Mark> {
        let mark = self.reserve(gpu)?;
        if let Err(source) = self.event(mark).record(stream) {
            self.used = mark.0;
            return Err(Error::driver("an event", source));
        }
        Ok(mark)
    }

    /// A moment whose [event](Clock::event) is yet to be recorded; before that it is none.
    ///
    /// # Errors
    /// An event cannot be made.
    pub(super) fn reserve(&mut self, gpu: &Gpu) -> Result<Mark> {
        let at = self.used;
        if at == self.events.len() {
            self.events.push(gpu.event()?);
        }
        self.used += 1;
        Ok(Mark(at))
    }

    /// The last moment of this pass.
    pub(super) fn last(&self) -> Option<Mark> {
        self.used.checked_sub(1).map(Mark)
    }

    /// The event of a moment of this pass.
    pub(super) fn event(&self, mark: Mark) -> &CudaEvent {
        &self.events[mark.0]
    }

    /// When a moment of this pass was, once its stream has come so far.
    ///
    /// # Errors
    /// The GPU's work failed.
    pub(super) fn time(&self, mark: Mark) -> Result<Instant> {
        let since = self.events[0].elapsed_ms(self.event(mark));
        let since = since.map_err(|source| Error::driver("an event's time", source))?;
        let since = Duration::from_nanos((f64::from(since).max(0.0) * 1e6) as u64);
        Ok(self.origin.unwrap_or_else(Instant::now) + since)
    }
}
