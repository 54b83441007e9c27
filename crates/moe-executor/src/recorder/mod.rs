//! Writes a [`TensorAccessLog`] for every operation that the executor runs.
//!
//! The hot path copies a record template and patches the fields that change between passes. The templates are made in the
//! first pass and found by their index in the pass, because the operations of a pass always have the same order.
//!
//! # Times
//!
//! All times are on one clock, [`TraceClock`]. `timestamp_ns` is the start of the computation:
//!
//! - On the CPU: when all inputs are available. This is the end of the previous operation, the end of a wait for a GPU, or
//!   the end of the call that launched earlier work on a GPU.
//! - On a GPU: when its stream reaches the operation. This is the end of the previous kernel. If another device ran or the
//!   CPU waited in between, it is an event recorded before the launch, or after the copies from other GPUs that the operation
//!   reads. [`cuda::timeline`](crate::cuda) converts the events of each GPU to the CPU's clock.
//! - Several operations in one kernel: the first has the kernel's time. The others have a duration of 0 and start 1 ns after
//!   the previous one, but not after the end of the kernel.
//! - An operation that failed on a GPU has the time of its computation on the CPU and a flag.
//!
//! In a session with GPUs, another thread writes the records of a pass while the next one runs.
//!
//! The records of a pass are written in the order of their starts. This is the order of the graph, except for CPU operations
//! that ran concurrently with independent GPU operations. Timestamps never decrease within a run.

mod output;
mod routing;
mod rows;
mod source;
mod tokens;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use moe_engine::{Mode, TokenSequence, TraceClock};
use moe_trace::buffers::BufferEvent;
use moe_trace::record::{self, MAX_SOURCES};
use moe_trace::transfers::{Span, Transfer};
use moe_trace::{LayerId, Phase, RunWriter, TensorAccessLog, TokenId};

use crate::activation::NodeName;
use crate::buffers::Timestamp;
use crate::capture::Capture;
use crate::cuda::Event;
use crate::cuda::post_fetch::Sample;
use crate::device_id::DeviceId;
use crate::devices::Devices;
use crate::error::{Error, Result};

use output::Output;
pub(crate) use routing::SelectedExperts;
pub use routing::{LaneCounts, Lanes, Routing};
pub use rows::RoutedRows;
use rows::{Pending, Rows, write_one};
pub use source::Source;
use source::template;
pub use tokens::PassTokens;

/// The forward pass that operations belong to.
#[derive(Clone, Copy)]
pub struct PassInfo {
    /// Sequence (request) and phase of its first token.
    pub first: TokenSequence,
    /// Whether all operations of the graph run. A batch of a prompt without logits ends before the last operations.
    pub is_complete: bool,
}

/// When an operation ran.
#[derive(Clone, Copy)]
pub enum When {
    /// On the CPU, from this time to now.
    Cpu(Instant),
    /// On a GPU, between two events of its stream.
    Gpu(DeviceId, Event, Event),
    /// In the kernel of the previous operation.
    Fused,
}

/// Maximum time before records are passed to the writing thread. A shorter time loses fewer records if the process is killed, a
/// longer time wakes the thread less often.
const FLUSH_EVERY: Duration = Duration::from_millis(20);

/// The record of an operation with all fields that are constant, and the operation it belongs to.
struct Template {
    op: u8,
    dst: NodeName,
    record: TensorAccessLog,
}

/// Writes the records of a run. Without a writer it does nothing.
pub struct Recorder {
    output: Option<Output>,
    /// Whether recording is paused.
    is_paused: bool,
    mode: Mode,
    clock: TraceClock,
    pass: PassInfo,
    templates: Vec<Template>,
    next: usize,
    /// Start of the pass.
    pass_start: Instant,
    /// Earliest start of the CPU's next operation: the end of its last recorded operation, or later.
    last_end: Instant,
    /// Time of the last flush.
    flushed: Instant,
    failed: Option<moe_trace::Error>,
    /// Whether records are written at the end of their pass, when the times of GPU operations are known.
    waits: bool,
    pending: Vec<Pending>,
    /// Lanes of pending expert operations, by layer.
    late_lanes: BTreeMap<LayerId, Vec<u8>>,
    /// Whether the next operation failed on a GPU and is computed on the CPU.
    fell_back: bool,
    /// The graph of this pass, if it is the first complete pass of its phase.
    capture: Option<Capture>,
    /// Whether the run directory contains the graph of each phase.
    captured: [bool; Phase::ALL.len()],
}

impl Recorder {
    /// A recorder that writes to a run directory, or records nothing without a writer.
    pub fn new(writer: Option<RunWriter>) -> Recorder {
        let clock = TraceClock::new();
        let origin = clock.origin();
        Recorder {
            output: writer.map(|writer| Output::Direct(Box::new(writer))),
            is_paused: false,
            mode: Mode::All,
            clock,
            pass: PassInfo {
                first: TokenSequence {
                    id: 0,
                    phase: Phase::Prompt,
                },
                is_complete: false,
            },
            templates: Vec::new(),
            next: 0,
            pass_start: origin,
            last_end: origin,
            flushed: origin,
            failed: None,
            waits: false,
            pending: Vec::new(),
            late_lanes: BTreeMap::new(),
            fell_back: false,
            capture: None,
            captured: [false; Phase::ALL.len()],
        }
    }

    /// Phase of the first token of the pass.
    pub fn phase(&self) -> Phase {
        self.pass.first.phase
    }

    /// Selects the operations to record.
    pub fn with_mode(self, mode: Mode) -> Recorder {
        Recorder { mode, ..self }
    }

    /// Writes records at the end of their pass, on another thread, for sessions with GPUs.
    pub(crate) fn wait_for_gpu(&mut self) {
        self.waits = true;
        self.output = match self.output.take() {
            Some(Output::Direct(writer)) => Some(Output::threaded(*writer)),
            output => output,
        };
    }

    /// Whether anything is recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.output.is_some() && !self.is_paused
    }

    /// Selects the operations to record from the next pass on; `None` pauses recording.
    pub(crate) fn set_mode(&mut self, mode: Option<Mode>) {
        self.is_paused = mode.is_none();
        self.mode = mode.unwrap_or(self.mode);
    }

    /// Waits until the files contain all completed passes.
    ///
    /// # Errors
    /// The first failed write so far.
    pub(crate) fn wait(&mut self) -> Result<()> {
        match &mut self.output {
            Some(output) => Ok(output.wait()?),
            None => Ok(()),
        }
    }

    /// Whether `n_records` more records fit in the limit of the trace.
    pub(crate) fn has_room(&self, n_records: u64) -> bool {
        let output = self.output.as_ref();
        output.is_none_or(|output| output.has_room(n_records))
    }

    /// Notes that the CPU waited for a GPU or launched work on it: its next operation starts now.
    pub(crate) fn host_is_free(&mut self) {
        if self.is_on() {
            self.last_end = Instant::now();
        }
    }

    /// Notes that the next operation failed on a GPU and is computed on the CPU.
    pub(crate) fn fell_back(&mut self) {
        self.fell_back = true;
    }

    /// Sets the lanes of the operations of this pass that were recorded with [`Lanes::Late`], by layer.
    pub(crate) fn late_lanes(&mut self, lanes: BTreeMap<LayerId, Vec<u8>>) {
        self.late_lanes = lanes;
    }

    /// The lanes of the experts of a layer that were set at the end of the last pass.
    pub(crate) fn late(&self, layer: LayerId) -> Option<Lanes<'_>> {
        let lanes = self.late_lanes.get(&layer)?;
        Some(Lanes::Each(lanes))
    }

    /// Which operations are recorded.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Starts a forward pass.
    pub fn begin(&mut self, pass: PassInfo) {
        self.pass = pass;
        self.next = 0;
        // Records of a pass that failed.
        self.pending.clear();
        if self.is_on() {
            self.last_end = Instant::now();
            self.pass_start = self.last_end;
        }
        let is_wanted = !self.captured[usize::from(pass.first.phase.number())];
        self.capture = (is_wanted && pass.is_complete && self.is_on()).then(Capture::default);
    }

    /// Adds the last result of a pass, which no operation reads, to the graph.
    pub fn result(&mut self, result: Source) {
        if let Some(capture) = &mut self.capture {
            capture.result(&result);
        }
    }

    /// Converts a time to the clock of the records.
    pub(crate) fn timestamp(&self, at: Instant) -> Timestamp {
        Timestamp {
            since_start_ns: self.clock.since_origin_ns(at),
            timestamp_ns: self.clock.ns(at),
        }
    }

    /// Writes buffer events to the run directory.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn buffers(&mut self, events: &[BufferEvent]) -> Result<()> {
        match &mut self.output {
            Some(output) => Ok(output.with(|writer| writer.write_buffer_events(events))?),
            None => Ok(()),
        }
    }

    /// Writes the Post-Fetch transfers of a pass to the run directory. `position` is that of the first token of the pass.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn transfers(&mut self, samples: &[Sample], position: TokenId) -> Result<()> {
        if !self.is_on() || samples.is_empty() {
            return Ok(());
        }
        let Some(output) = &mut self.output else {
            return Ok(());
        };
        let clock = &self.clock;
        let span = |(start, end): (Instant, Instant)| Span {
            start_ns: clock.ns(start),
            end_ns: clock.ns(end.max(start)),
        };
        let transfer = |sample: &Sample| Transfer {
            sequence_id: self.pass.first.id,
            token_id: position,
            phase: self.pass.first.phase,
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
        Ok(output.with(|writer| writer.write_transfers(&transfers))?)
    }

    /// Ends a forward pass, which must be complete on all `devices`: writes pending records, and flushes if the last flush
    /// was more than 20 ms ago.
    ///
    /// # Errors
    /// The first write error of this pass.
    pub fn end(&mut self, devices: &Devices) -> Result<()> {
        if self.waits {
            self.write_pending(devices)?;
        }
        if let Some(error) = self.failed.take() {
            return Err(Error::Trace(error));
        }
        let Some(output) = &mut self.output else {
            return Ok(());
        };
        if let Some(writer) = output.direct()
            && self.last_end.duration_since(self.flushed) >= FLUSH_EVERY
        {
            writer.flush()?;
            self.flushed = self.last_end;
        }
        if let Some(capture) = self.capture.take() {
            let phase = self.pass.first.phase;
            let graph = capture.finish(phase);
            output.with(|writer| writer.write_graph(phase, &graph))?;
            self.captured[usize::from(phase.number())] = true;
        }
        Ok(())
    }

    /// The writer, for finishing the run.
    pub fn into_writer(self) -> Option<RunWriter> {
        self.output?.into_writer()
    }

    /// Start time of an operation on the CPU, for [`When::Cpu`]. It is the end of the previous operation, so that the clock is
    /// read once per operation.
    pub fn start(&self) -> Instant {
        self.last_end
    }

    /// Start time of an expert operation on the CPU, for [`When::Cpu`]. In [`Mode::Experts`] the previous operations are not
    /// recorded, so the clock is read here.
    pub fn start_experts(&self) -> Instant {
        match (self.is_on(), self.mode) {
            (true, Mode::Experts) => Instant::now(),
            _ => self.last_end,
        }
    }

    /// Records an operation on `tokens`. The record has the sequence, phase and position of the first.
    pub fn op(
        &mut self,
        when: When,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        tokens: PassTokens,
    ) {
        if self.mode == Mode::All && self.prepare(when, op, dst, sources, tokens) {
            self.write(when, None);
        }
        // If this operation is not recorded, its fallback is not recorded either.
        self.fell_back = false;
        if let Some(capture) = &mut self.capture {
            capture.operation(op, dst, sources, tokens.first_position(), tokens.len());
        }
    }

    /// Records an expert operation: one record per token, or several if the token has more than 16 experts.
    pub fn experts(
        &mut self,
        when: When,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        routed: &RoutedRows,
    ) {
        let tokens = routed.tokens;
        if self.prepare(when, op, dst, sources, tokens) {
            self.write(when, Some(routed));
        }
        if let Some(capture) = &mut self.capture {
            capture.operation(op, dst, sources, tokens.first_position(), tokens.len());
        }
    }

    /// Sets the fields of the operation's record; those of the token are of the first one. Returns whether the operation is recorded.
    fn prepare(
        &mut self,
        when: When,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        tokens: PassTokens,
    ) -> bool {
        let Some(first) = tokens.first() else {
            return false;
        };
        if !self.is_on() || self.failed.is_some() {
            return false;
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
        if let When::Cpu(start) = when {
            let end = Instant::now();
            // An operation that waited for a GPU started at the end of the wait.
            let start = start.max(self.last_end);
            record.timestamp_ns.set(self.clock.ns(start));
            record
                .duration_ns
                .set(end.duration_since(start).as_nanos() as u64);
            self.last_end = end;
        }
        first.write(record);
        record.n_tokens.set(tokens.len() as u32);
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
        true
    }

    /// Writes the prepared record, or one record per token of `routed`.
    fn write(&mut self, when: When, routed: Option<&RoutedRows>) {
        let record = &self.templates[self.next].record;
        self.next += 1;
        if self.waits {
            self.pending.push(Pending {
                record: *record,
                when,
                rows: routed.map(RoutedRows::keep),
            });
            return;
        }
        let Some(writer) = self.output.as_mut().and_then(Output::direct) else {
            return;
        };
        let written = match routed {
            None => write_one(writer, record),
            Some(routed) => {
                let rows = Rows {
                    tokens: routed.tokens,
                    ids: routed.routing.ids.host(),
                    weights: routed.routing.weights.host(),
                    k: routed.routing.n_expert_used,
                    lanes: routed.lanes,
                };
                let written = rows.write(writer, record);
                if rows.tokens.len() > 1 {
                    // Writing the records of a batch takes measurable time, which is not part of the next operation.
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
