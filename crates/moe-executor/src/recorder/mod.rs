//! Writes a [`TensorAccessLog`] for every operation that the executor runs.
//!
//! The hot path copies a ready record and patches what changes from token to token. The ready records are made in the
//! first pass and found again by their place in the pass: the operations of a pass come in the same order every time.
//!
//! # Times
//!
//! All times are on one clock, [`TraceClock`]. `timestamp_ns` is when the operation started to compute:
//!
//! - On the host, when it had all that it reads: the end of the operation before, or the return of the wait for the GPU, or of the
//!   call that launched the GPU's work before it.
//! - On a GPU, when its stream came to it: the end of the kernel before, or, if another device ran or the host waited in between, an
//!   event recorded before the launch, or after the copies from other GPUs that the operation reads. The events of each GPU are laid
//!   onto the host's clock by [`cuda::timeline`](crate::cuda).
//! - Several operations in one kernel: the first of them has the kernel's time. The others have no duration and start 1 ns after
//!   the one before, at most at the kernel's end.
//! - An operation that failed on the GPU is the host's, and flagged.
//!
//! The records of a pass are written in the order of their starts. This is the order of the graph, except for operations of the
//! host that ran next to the GPU's because neither reads what the other writes. So timestamps never decrease within a run.

mod routing;
mod rows;
mod source;

use std::time::{Duration, Instant};

use moe_engine::{Mode, TraceClock};
use moe_trace::buffers::BufferEvent;
use moe_trace::record::{self, MAX_SOURCES};
use moe_trace::transfers::{Span, Transfer};
use moe_trace::{LayerId, Phase, RunWriter, TensorAccessLog, TokenId};

use crate::activation::NodeName;
use crate::buffers::Moment;
use crate::capture::Capture;
use crate::cuda::Event;
use crate::cuda::post_fetch::Sample;
use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::placement::DeviceId;

pub use routing::{LaneCounts, Lanes, Routing};
pub use rows::RoutedRows;
use rows::{Pending, Rows, one};
pub use source::Source;
use source::template;

/// The pass that operations belong to.
#[derive(Clone, Copy)]
pub struct PassInfo {
    /// Request.
    pub sequence_id: u32,
    /// Phase of its tokens.
    pub phase: Phase,
    /// Whether all operations of the graph run: a batch of a prompt whose logits nobody wants ends before the last.
    pub is_whole: bool,
}

/// When an operation ran.
#[derive(Clone, Copy)]
pub enum When {
    /// On the host, from here to now.
    Host(Instant),
    /// On a GPU, between two events of its stream.
    Gpu(DeviceId, Event, Event),
    /// In the kernel of the operation before.
    Within,
}

/// How long records may wait to be handed to the file: less is lost to a kill, more wakes the writing thread less often.
const FLUSH_EVERY: Duration = Duration::from_millis(20);

/// A record made ready, and what it was made for.
struct Template {
    op: u8,
    dst: NodeName,
    record: TensorAccessLog,
}

/// Writes records; without a writer it does nothing.
pub struct Recorder {
    writer: Option<RunWriter>,
    mode: Mode,
    clock: TraceClock,
    pass: PassInfo,
    templates: Vec<Template>,
    next: usize,
    /// Start of the pass.
    pass_start: Instant,
    /// When the host's next operation can start: the end of its last recorded one, or later.
    last_end: Instant,
    /// When records were last handed to the file.
    flushed: Instant,
    failed: Option<moe_trace::Error>,
    /// Whether operations wait for the end of their pass.
    waits: bool,
    pending: Vec<Pending>,
    /// Index of each pending operation, in the order of their starts.
    order: Vec<usize>,
    /// Whether the GPU failed at the operation that comes next.
    fell_back: bool,
    /// The graph of this pass, if it is the first whole one of its phase.
    capture: Option<Capture>,
    /// Phases whose graph is in the run.
    captured: [bool; Phase::ALL.len()],
}

impl Recorder {
    /// A recorder into a run directory, or one that records nothing.
    pub fn new(writer: Option<RunWriter>) -> Recorder {
        let clock = TraceClock::new();
        let origin = clock.origin();
        Recorder {
            writer,
            mode: Mode::All,
            clock,
            pass: PassInfo {
                sequence_id: 0,
                phase: Phase::Prompt,
                is_whole: false,
            },
            templates: Vec::new(),
            next: 0,
            pass_start: origin,
            last_end: origin,
            flushed: origin,
            failed: None,
            waits: false,
            pending: Vec::new(),
            order: Vec::new(),
            fell_back: false,
            capture: None,
            captured: [false; Phase::ALL.len()],
        }
    }

    /// Has only some operations recorded.
    pub fn with_mode(self, mode: Mode) -> Recorder {
        Recorder { mode, ..self }
    }

    /// Has operations wait for the end of their pass, for one that the GPU takes part in.
    pub(crate) fn wait_for_gpu(&mut self) {
        self.waits = true;
    }

    /// Whether anything is recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.writer.is_some()
    }

    /// The host waited for the GPU, or launched work on it: its next operation starts now.
    pub(crate) fn host_is_free(&mut self) {
        if self.is_on() {
            self.last_end = Instant::now();
        }
    }

    /// The GPU failed at the operation that comes next, which the host does.
    pub(crate) fn fell_back(&mut self) {
        self.fell_back = true;
    }

    /// Which operations are recorded.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Begins a pass over the graph.
    pub fn begin(&mut self, pass: PassInfo) {
        self.pass = pass;
        self.next = 0;
        // Those of a pass that failed.
        self.pending.clear();
        if self.writer.is_some() {
            self.last_end = Instant::now();
            self.pass_start = self.last_end;
        }
        let is_wanted = !self.captured[usize::from(pass.phase.number())];
        self.capture = (is_wanted && pass.is_whole && self.writer.is_some()).then(Capture::default);
    }

    /// Tells of the last result of a pass, which no operation reads.
    pub fn result(&mut self, result: Source) {
        if let Some(capture) = &mut self.capture {
            capture.result(&result);
        }
    }

    /// `at` on the clock of the records.
    pub(crate) fn moment(&self, at: Instant) -> Moment {
        Moment {
            since_start_ns: self.clock.since_origin_ns(at),
            timestamp_ns: self.clock.ns(at),
        }
    }

    /// Tells the run of buffers that came or went.
    ///
    /// # Errors
    /// They cannot be written.
    pub(crate) fn buffers(&mut self, events: &[BufferEvent]) -> Result<()> {
        match &mut self.writer {
            Some(writer) => Ok(writer.write_buffer_events(events)?),
            None => Ok(()),
        }
    }

    /// Tells the run what Post-Fetch did in a pass whose first row is at `position`.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn transfers(&mut self, samples: &[Sample], position: u32) -> Result<()> {
        let (Some(writer), false) = (&mut self.writer, samples.is_empty()) else {
            return Ok(());
        };
        let clock = &self.clock;
        let span = |(start, end): (Instant, Instant)| Span {
            start_ns: clock.ns(start),
            end_ns: clock.ns(end.max(start)),
        };
        let transfer = |sample: &Sample| Transfer {
            sequence_id: self.pass.sequence_id,
            token_id: TokenId(position),
            phase: self.pass.phase,
            layer_id: LayerId(sample.layer as u16),
            n_tokens: sample.n_tokens as u32,
            n_experts: sample.n_experts as u32,
            n_fetched: sample.n_fetched as u32,
            bytes: sample.bytes,
            transfer: sample.transfer.map(span),
            window: span(sample.window),
            product: sample.product.map(span),
        };
        let transfers: Vec<Transfer> = samples.iter().map(transfer).collect();
        Ok(writer.write_transfers(&transfers)?)
    }

    /// Ends a pass: hands what was recorded to the file, if that was not done a moment ago. All of `devices` have come to the end
    /// of the pass.
    ///
    /// # Errors
    /// The first write that failed in this pass.
    pub fn end(&mut self, devices: &Devices) -> Result<()> {
        if self.waits {
            self.settle(devices)?;
        }
        if let Some(error) = self.failed.take() {
            return Err(Error::Trace(error));
        }
        let Some(writer) = &mut self.writer else {
            return Ok(());
        };
        if self.last_end.duration_since(self.flushed) >= FLUSH_EVERY {
            writer.flush()?;
            self.flushed = self.last_end;
        }
        if let Some(capture) = self.capture.take() {
            let phase = self.pass.phase;
            writer.write_graph(phase, &capture.finish(phase))?;
            self.captured[usize::from(phase.number())] = true;
        }
        Ok(())
    }

    /// The writer, when the run is over.
    pub fn into_writer(self) -> Option<RunWriter> {
        self.writer
    }

    /// The writer while the run goes on.
    pub fn writer(&self) -> Option<&RunWriter> {
        self.writer.as_ref()
    }

    /// Time before an operation of the host; pass it to [`Recorder::op`]. Operations follow one another, so it is the end of the one
    /// before: the clock is looked at once for an operation.
    pub fn start(&self) -> Instant {
        self.last_end
    }

    /// Time before an expert operation; pass it to [`Recorder::experts`].
    pub fn start_experts(&self) -> Instant {
        match (&self.writer, self.mode) {
            (Some(_), Mode::Experts) => Instant::now(),
            _ => self.last_end,
        }
    }

    /// Records an operation on rows whose first is at `position`.
    pub fn op(
        &mut self,
        when: When,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        position: u32,
        n_tokens: usize,
    ) {
        if self.mode == Mode::All
            && let Some(record) = self.prepare(when, op, dst, sources, n_tokens)
        {
            record.token_id.set(position);
            self.write(when, None);
        }
        // What failed here is told here or, where this leaves no record, nowhere.
        self.fell_back = false;
        if let Some(capture) = &mut self.capture {
            capture.operation(op, dst, sources, position, n_tokens);
        }
    }

    /// Records an expert operation: one record a row, more when the row has over 16 experts.
    pub fn experts(
        &mut self,
        when: When,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        choice: &RoutedRows,
    ) {
        let positions = choice.positions;
        if self
            .prepare(when, op, dst, sources, positions.len())
            .is_some()
        {
            self.write(when, Some(choice));
        }
        if let Some(capture) = &mut self.capture {
            let first = positions.first().copied().unwrap_or(0);
            capture.operation(op, dst, sources, first, positions.len());
        }
    }

    /// The ready record of the operation with what changes from pass to pass, if it is to be written.
    fn prepare(
        &mut self,
        when: When,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        n_tokens: usize,
    ) -> Option<&mut TensorAccessLog> {
        if self.writer.is_none() || self.failed.is_some() || n_tokens == 0 {
            return None;
        }
        let known = self
            .templates
            .get(self.next)
            .is_some_and(|t| t.op == op && t.dst == dst);
        if !known {
            self.templates.truncate(self.next);
            self.templates.push(Template {
                op,
                dst,
                record: template(op, dst, sources),
            });
        }
        let record = &mut self.templates[self.next].record;
        if let When::Host(start) = when {
            let end = Instant::now();
            // One that waited for the GPU began when it had what it reads.
            let start = start.max(self.last_end);
            record.timestamp_ns.set(self.clock.ns(start));
            record
                .duration_ns
                .set(end.duration_since(start).as_nanos() as u64);
            self.last_end = end;
        }
        record.phase = self.pass.phase.number();
        record.sequence_id.set(self.pass.sequence_id);
        record.n_tokens.set(n_tokens as u32);
        record.flags &= !record::FLAG_CPU_FALLBACK;
        if std::mem::take(&mut self.fell_back) {
            record.flags |= record::FLAG_CPU_FALLBACK;
        }
        for (at, source) in sources.iter().take(MAX_SOURCES).enumerate() {
            if let Source::Buffer {
                buffer_id,
                address,
                size_bytes,
                ..
            } = source
            {
                record.sources[at].tensor_ptr.set(*address);
                record.sources[at].offset_or_buffer_id.set(*buffer_id);
                record.set_source_size(at, *size_bytes);
            }
        }
        Some(record)
    }

    /// Writes the record that was prepared, or one for each row of a choice.
    fn write(&mut self, when: When, choice: Option<&RoutedRows>) {
        let record = &self.templates[self.next].record;
        self.next += 1;
        if self.waits {
            self.pending.push(Pending {
                record: *record,
                when,
                rows: choice.map(RoutedRows::keep),
            });
            return;
        }
        let Some(writer) = &mut self.writer else {
            return;
        };
        let written = match choice {
            None => one(writer, record),
            Some(choice) => {
                let rows = Rows {
                    positions: choice.positions,
                    ids: choice.routing.ids.host(),
                    weights: choice.routing.weights.host(),
                    k: choice.routing.n_expert_used,
                    lanes: choice.lanes,
                };
                let written = rows.write(writer, record);
                if rows.positions.len() > 1 {
                    // The records of one row take no time worth a look at the clock, those of a batch do.
                    self.last_end = Instant::now();
                }
                written
            }
        };
        self.failed = written.err();
    }
}

#[cfg(test)]
mod tests;
