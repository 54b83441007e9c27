//! Writes a [`TensorAccessLog`] for every operation that the executor runs.
//!
//! The hot path copies a ready record and patches what changes from token to token. The ready records are made in the
//! first pass and found again by their place in the pass: the operations of a pass come in the same order every time.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use moe_trace::buffers::BufferEvent;
use moe_trace::record::{self, MAX_EXPERTS, MAX_SOURCES};
use moe_trace::tables::PHASES;
use moe_trace::{RunWriter, TensorAccessLog};

use crate::activation::{Activation, NodeName};
use crate::buffers::Moment;
use crate::capture::Capture;
use crate::error::{Error, Result};
use crate::weights::{Matrix, Place, Vector};

/// What an operation reads.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// A tensor of the model's file.
    Weight(&'a Place, u64),
    /// Memory that the executor owns.
    Buffer {
        /// Name of the node that wrote it.
        name: NodeName,
        /// What llama.cpp appends when the node is read through a view, such as ` (reshaped)`.
        suffix: &'static str,
        /// Identity of the memory.
        buffer_id: u64,
        /// Address of the first byte.
        address: u64,
        /// Bytes read.
        size_bytes: u64,
        /// Elements of a row, and rows.
        ne: [u64; 2],
        /// Type of the elements.
        dtype: &'static str,
    },
}

impl<'a> From<&'a Matrix<'_>> for Source<'a> {
    fn from(matrix: &'a Matrix<'_>) -> Self {
        Source::Weight(&matrix.place, matrix.address())
    }
}

impl<'a> From<&'a Vector> for Source<'a> {
    fn from(vector: &'a Vector) -> Self {
        Source::Weight(&vector.place, vector.data.as_ptr() as u64)
    }
}

impl From<&Activation> for Source<'_> {
    fn from(activation: &Activation) -> Self {
        Source::view(activation, "")
    }
}

impl Source<'_> {
    /// A buffer read through a view that llama.cpp names with a suffix.
    pub fn view(activation: &Activation, suffix: &'static str) -> Self {
        Source::Buffer {
            name: activation.name,
            suffix,
            buffer_id: activation.buffer_id,
            address: activation.address(),
            size_bytes: activation.size_bytes(),
            ne: [activation.width as u64, activation.rows as u64],
            dtype: "f32",
        }
    }

    /// One of `n_expert_used` rows of every token, a view. As ggml counts, it takes the bytes from its first row to its last.
    pub fn slots(experts: &Activation, n_expert_used: usize) -> Self {
        let tokens = experts.rows / n_expert_used;
        let rows = (tokens.saturating_sub(1) * n_expert_used + 1).min(experts.rows);
        Source::Buffer {
            name: experts.name,
            suffix: " (view)",
            buffer_id: experts.buffer_id,
            address: experts.address(),
            size_bytes: (rows * experts.width * size_of::<f32>()) as u64,
            ne: [experts.width as u64, tokens as u64],
            dtype: "f32",
        }
    }
}

/// The router's choice for some rows.
#[derive(Default)]
pub struct Routing {
    /// Chosen experts `(row, n_expert_used)`, best first.
    pub ids: Vec<i32>,
    /// Weight of each as applied `(row, n_expert_used)`.
    pub weights: Vec<f32>,
    /// Experts of a row.
    pub n_expert_used: usize,
}

/// The pass that operations belong to.
#[derive(Clone, Copy)]
pub struct Pass {
    /// Request.
    pub sequence_id: u32,
    /// [`record::PHASE_PROMPT`] or [`record::PHASE_GENERATE`].
    pub phase: u8,
    /// Whether all operations of the graph run: a batch of a prompt whose logits nobody wants ends before the last.
    pub is_whole: bool,
}

/// Which operations leave records.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// All of them.
    #[default]
    All,
    /// The expert operations alone (`MUL_MAT_ID`, `ADD_ID`).
    Experts,
}

/// How long records may wait to be handed to the file: less is lost to a kill, more wakes the writing thread less often.
const FLUSH_EVERY: Duration = Duration::from_millis(20);

/// Monotonic time in nanoseconds, counted from the Unix time at which the clock was made.
pub struct Clock {
    origin: Instant,
    origin_ns: u64,
}

impl Clock {
    /// A clock that starts now.
    pub fn new() -> Clock {
        let unix = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        // A timestamp of zero would end the trace.
        Clock {
            origin: Instant::now(),
            origin_ns: (unix.as_nanos() as u64).max(1),
        }
    }

    /// The time of an instant.
    pub fn ns(&self, at: Instant) -> u64 {
        self.origin_ns + at.saturating_duration_since(self.origin).as_nanos() as u64
    }
}

impl Default for Clock {
    fn default() -> Self {
        Clock::new()
    }
}

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
    clock: Clock,
    pass: Pass,
    templates: Vec<Template>,
    next: usize,
    /// End of the last recorded operation, or the beginning of the pass.
    last_end: Instant,
    /// When records were last handed to the file.
    flushed: Instant,
    failed: Option<moe_trace::Error>,
    /// The graph of this pass, if it is the first whole one of its phase.
    capture: Option<Capture>,
    /// Phases whose graph is in the run.
    captured: [bool; PHASES.len()],
}

impl Recorder {
    /// A recorder into a run directory, or one that records nothing.
    pub fn new(writer: Option<RunWriter>) -> Recorder {
        let clock = Clock::new();
        let origin = clock.origin;
        Recorder {
            writer,
            mode: Mode::All,
            clock,
            pass: Pass {
                sequence_id: 0,
                phase: record::PHASE_PROMPT,
                is_whole: false,
            },
            templates: Vec::new(),
            next: 0,
            last_end: origin,
            flushed: origin,
            failed: None,
            capture: None,
            captured: [false; PHASES.len()],
        }
    }

    /// Has only some operations recorded.
    pub fn with_mode(self, mode: Mode) -> Recorder {
        Recorder { mode, ..self }
    }

    /// Which operations are recorded.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Begins a pass over the graph.
    pub fn begin(&mut self, pass: Pass) {
        self.pass = pass;
        self.next = 0;
        if self.writer.is_some() {
            self.last_end = Instant::now();
        }
        let is_wanted = self.captured.get(usize::from(pass.phase)) == Some(&false);
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
        let timestamp_ns = self.clock.ns(at);
        Moment {
            since_start_ns: timestamp_ns - self.clock.origin_ns,
            timestamp_ns,
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

    /// Ends a pass: hands what was recorded to the file, if that was not done a moment ago.
    ///
    /// # Errors
    /// The first write that failed in this pass.
    pub fn end(&mut self) -> Result<()> {
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
            if let Some(captured) = self.captured.get_mut(usize::from(phase)) {
                *captured = true;
            }
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

    /// Time before an operation; pass it to [`Recorder::op`]. Operations follow one another, so it is the end of the one
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
        start: Instant,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        position: u32,
        n_tokens: usize,
    ) {
        if self.mode == Mode::All {
            self.write(start, op, dst, sources, n_tokens, |record, _| {
                record.token_id.set(position);
                true
            });
        }
        if let Some(capture) = &mut self.capture {
            capture.operation(op, dst, sources, position, n_tokens);
        }
    }

    /// Records an expert operation: one record a row, more when the row has over 16 experts.
    pub fn experts(
        &mut self,
        start: Instant,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        positions: &[u32],
        routing: &Routing,
    ) {
        let k = routing.n_expert_used;
        let per_row = k.div_ceil(MAX_EXPERTS);
        self.write(start, op, dst, sources, positions.len(), |record, i| {
            let (row, base) = (i / per_row, i % per_row * MAX_EXPERTS);
            let slots = row * k + base..row * k + (base + MAX_EXPERTS).min(k);
            record.token_id.set(positions[row]);
            record.num_experts = slots.len() as u8;
            record.expert_slot_base = base as u8;
            if base > 0 {
                record.flags |= record::FLAG_CONTINUATION;
            }
            for (at, slot) in slots.enumerate() {
                record.expert_ids[at].set(routing.ids[slot]);
                record.expert_weights[at].set(routing.weights[slot]);
                record.expert_lane[at] = record::lane::CPU;
            }
            i + 1 == positions.len() * per_row
        });
        if let Some(capture) = &mut self.capture {
            let first = positions.first().copied().unwrap_or(0);
            capture.operation(op, dst, sources, first, positions.len());
        }
    }

    /// Writes records of one operation until `fill` says that it was the last.
    fn write(
        &mut self,
        start: Instant,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        n_tokens: usize,
        mut fill: impl FnMut(&mut TensorAccessLog, usize) -> bool,
    ) {
        let Some(writer) = &mut self.writer else {
            return;
        };
        if self.failed.is_some() || n_tokens == 0 {
            return;
        }
        let end = Instant::now();
        let duration = end.duration_since(start).as_nanos() as u64;
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
        self.next += 1;
        record.timestamp_ns.set(self.clock.ns(start));
        record.phase = self.pass.phase;
        record.sequence_id.set(self.pass.sequence_id);
        record.duration_ns.set(duration);
        record.n_tokens.set(n_tokens as u32);
        for (at, source) in sources.iter().take(MAX_SOURCES).enumerate() {
            if let Source::Buffer {
                address,
                size_bytes,
                ..
            } = source
            {
                record.sources[at].tensor_ptr.set(*address);
                record.set_source_size(at, *size_bytes);
            }
        }
        for i in 0.. {
            match writer.next_record() {
                Ok(slot) => {
                    slot.clone_from(record);
                    if fill(slot, i) {
                        // One record takes no time worth a look at the clock, those of a batch do.
                        self.last_end = if i == 0 { end } else { Instant::now() };
                        break;
                    }
                }
                Err(error) => {
                    self.failed = Some(error);
                    break;
                }
            }
        }
    }
}

fn template(op: u8, dst: NodeName, sources: &[Source]) -> TensorAccessLog {
    let mut record = TensorAccessLog::default();
    record.ext_version = record::EXT_V1;
    record.operation_type = op;
    record
        .layer_id
        .set(dst.layer().unwrap_or(moe_trace::NO_LAYER));
    record::set_name(&mut record.dst_name, &dst.to_string());
    record.num_sources = sources.len().min(MAX_SOURCES) as u8;
    if sources.len() > MAX_SOURCES {
        record.flags |= record::FLAG_SOURCES_OMITTED;
    }
    for (at, source) in sources.iter().take(MAX_SOURCES).enumerate() {
        let log = &mut record.sources[at];
        match source {
            Source::Weight(place, address) => {
                record::set_name(&mut log.name, &place.name);
                log.tensor_ptr.set(*address);
                log.layer_id.set(place.layer.unwrap_or(moe_trace::NO_LAYER));
                log.memory_source = record::SOURCE_DISK;
                log.offset_or_buffer_id.set(place.offset);
                log.tensor_idx.set(place.tensor_idx);
                record.source_file[at].set(place.file);
                record.set_source_size(at, place.size_bytes);
            }
            Source::Buffer {
                name,
                suffix,
                buffer_id,
                address,
                size_bytes,
                ..
            } => {
                record::set_name(&mut log.name, &format!("{name}{suffix}"));
                log.tensor_ptr.set(*address);
                log.layer_id
                    .set(name.layer().unwrap_or(moe_trace::NO_LAYER));
                log.memory_source = record::SOURCE_BUFFER;
                log.offset_or_buffer_id.set(*buffer_id);
                log.tensor_idx.set(moe_trace::NO_TENSOR);
                record.set_source_size(at, *size_bytes);
            }
        }
    }
    record
}
