//! Access patterns: how a run reads the files of its model.
//!
//! A *pass* is one evaluation of the model's graph, for a ubatch of the prompt or for one generated token. An *access* is a
//! byte range that an operation reads, as in the table `accesses`: one per source tensor, or one per distinct expert of an
//! expert tensor. Accesses are in the order of the trace.
//!
//! A look-up (`GET_ROWS` of a model tensor) records the entire tensor but reads one row per token; which rows is unknown.
//! [`Lookups`] counts look-ups separately, and no other figure contains them. Accesses to tensors that are not in the offset
//! map are not counted either.
//!
//! Memory is bounded by the size of the offset map and does not depend on the length of the trace.

mod coverage;
mod order;
mod reuse;
mod seeks;
mod span;
mod units;
mod volume;
mod working_set;

use std::path::PathBuf;

use moe_gguf::map::OffsetMap;
use moe_trace::correlation::{Unresolved, unresolved};
use moe_trace::passes::PassStarts;
use moe_trace::{ExpertId, FileAccesses, LayerId, Operation, Phase, RecordFault, Run};

use coverage::Coverage;
pub use coverage::LayerCoverage;
pub use order::LayerOrder;
use order::OrderCounter;
use reuse::ReuseCounter;
pub use reuse::{Distances, ExpertReuse, Histogram, Reuse};
use seeks::SeekCounter;
pub use seeks::{Direction, SeekBucket, Seeks};
use span::SpanCounter;
pub use span::{LayerSpan, SpanStats};
use units::{UnitId, Units};
use volume::VolumeCounter;
pub use volume::{LayerVolume, Lookups, PhaseVolume};
use working_set::WindowCounter;
pub use working_set::WorkingSet;

/// Reason why accesses cannot be analyzed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The run has no offset map.
    #[error("{} has no gguf-map.parquet, so the byte offsets of the model's tensors are unknown", path.display())]
    NoMap {
        /// The run directory.
        path: PathBuf,
    },
    /// The trace is empty.
    #[error("{}: the trace has no records; record the run again", path.display())]
    NoRecords {
        /// The trace file.
        path: PathBuf,
    },
    /// No access is in the offset map.
    #[error(
        "{} contains no access to a tensor in its offset map; check that the map belongs to this model",
        path.display()
    )]
    Empty {
        /// The run directory.
        path: PathBuf,
    },
    /// A record is invalid.
    #[error("{}: record {record} at byte {}: {fault}", path.display(), record * 1024)]
    Record {
        /// The trace file.
        path: PathBuf,
        /// Index of the record.
        record: u64,
        /// The fault, and how to fix it.
        #[source]
        fault: RecordFault,
    },
}

/// Access patterns of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct AccessReport {
    /// Order in which layers are read.
    pub order: LayerOrder,
    /// Bytes read in each phase: `[prompt, generated]`.
    pub phases: [PhaseVolume; 2],
    /// Bytes read by layer and phase. The layer is `None` for tensors that belong to no layer.
    pub layers: Vec<LayerVolume>,
    /// Look-ups, which no other figure contains.
    pub lookups: Lookups,
    /// Distances between consecutive accesses.
    pub seeks: Seeks,
    /// Working sets: distinct bytes read in windows of generated tokens.
    pub working_sets: Vec<WorkingSet>,
    /// Experts read in each layer.
    pub coverage: Vec<LayerCoverage>,
    /// Reuse distances of experts.
    pub reuse: Reuse,
    /// Time between the first and the last access to each layer in a pass.
    pub spans: Vec<LayerSpan>,
    /// Total size of the model's tensors in bytes.
    pub model_bytes: u64,
    /// Sources that are not in the offset map.
    pub unresolved: Vec<Unresolved>,
}

/// One access with its layer, phase and unit.
#[derive(Clone, Copy, Debug)]
struct Event {
    /// Layer of the tensor.
    layer: Option<LayerId>,
    phase: Phase,
    unit: UnitId,
    is_expert: bool,
    file: u16,
    file_offset: u64,
    size_bytes: u64,
    /// Start and end of the operation, in ns.
    time: (u64, u64),
}

/// A completed pass.
#[derive(Clone, Copy, Debug)]
struct PassTokens {
    phase: Phase,
    n_tokens: u64,
}

/// Analyzes the accesses of a run in one pass over the trace. `windows` are the lengths of working sets in tokens.
///
/// # Errors
/// [`Error::NoRecords`], [`Error::NoMap`], [`Error::Empty`], or [`Error::Record`] for an invalid record.
pub fn report(run: &Run, windows: &[u64]) -> Result<AccessReport, Error> {
    let path = || run.path.clone();
    if run.trace.operations().next().is_none() {
        return Err(Error::NoRecords {
            path: run.trace.path().to_owned(),
        });
    }
    let map = run
        .map
        .as_ref()
        .ok_or_else(|| Error::NoMap { path: path() })?;
    let mut walk = Walk::new(run, map, windows);
    let mut starts = PassStarts::new();
    for operation in run.trace.operations() {
        let error = |fault| Error::Record {
            path: run.trace.path().to_owned(),
            record: operation.first_record(),
            fault,
        };
        if starts.is_start(&operation) {
            walk.start_pass(&operation);
        }
        walk.operation(&operation).map_err(error)?;
    }
    walk.end_pass();
    let (unresolved, _) = unresolved(run);
    walk.finish(unresolved)
        .ok_or_else(|| Error::Empty { path: path() })
}

/// All counters and their inputs.
struct Walk<'a> {
    units: Units,
    accesses: FileAccesses<'a>,
    get_rows: Option<u8>,
    pass: Option<PassTokens>,
    n_accesses: u64,
    order: OrderCounter,
    volume: VolumeCounter,
    seeks: SeekCounter,
    windows: Vec<WindowCounter>,
    coverage: Coverage,
    reuse: ReuseCounter,
    spans: SpanCounter,
    /// Buffer for the experts of an operation.
    experts: Vec<ExpertId>,
    events: Vec<Event>,
}

impl<'a> Walk<'a> {
    fn new(run: &'a Run, map: &'a OffsetMap, windows: &[u64]) -> Self {
        let units = Units::new(map);
        Self {
            accesses: FileAccesses::new(Some(map)),
            get_rows: run.ops().number("GET_ROWS"),
            pass: None,
            n_accesses: 0,
            order: OrderCounter::default(),
            volume: VolumeCounter::new(units.n_layer()),
            seeks: SeekCounter::default(),
            windows: windows
                .iter()
                .map(|&n| WindowCounter::new(n, units.len()))
                .collect(),
            coverage: Coverage::new(units.len()),
            reuse: ReuseCounter::new(&units),
            spans: SpanCounter::new(units.n_layer()),
            experts: Vec::new(),
            events: Vec::new(),
            units,
        }
    }

    fn start_pass(&mut self, operation: &Operation) {
        self.end_pass();
        self.pass = Some(PassTokens {
            phase: operation.head().phase().unwrap_or(Phase::Generate),
            n_tokens: 0,
        });
    }

    /// Counts the accesses of an operation in the current pass.
    fn operation(&mut self, operation: &Operation) -> Result<(), RecordFault> {
        let head = operation.head();
        for record in operation.records() {
            record.check_readable()?;
        }
        let n_tokens = if head.has_extension() {
            u64::from(head.n_tokens.get())
        } else {
            operation.tokens().count() as u64
        };
        let Some(pass) = &mut self.pass else {
            return Ok(());
        };
        pass.n_tokens = pass.n_tokens.max(n_tokens);
        let phase = pass.phase;
        let is_lookup = Some(head.operation_type) == self.get_rows;
        let start = head.timestamp_ns.get();
        let duration = if head.has_extension() {
            head.duration_ns.get()
        } else {
            0
        };
        let time = (start, start.saturating_add(duration));
        let mut experts = std::mem::take(&mut self.experts);
        let accesses = &self.accesses;
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        let mut lookup_bytes = 0u64;
        accesses.of_operation(operation, &mut experts, |access| {
            if is_lookup {
                let row = access
                    .tensor_idx
                    .and_then(|index| self.units.row_bytes(index));
                lookup_bytes =
                    lookup_bytes.saturating_add(row.unwrap_or(0).saturating_mul(n_tokens));
                return;
            }
            let Some(unit) = self.units.of(&access) else {
                return;
            };
            events.push(Event {
                layer: self.units.layer(unit),
                phase,
                unit,
                is_expert: self.units.expert(unit).is_some(),
                file: access.file,
                file_offset: access.file_offset,
                size_bytes: access.size_bytes,
                time,
            });
        })?;
        self.experts = experts;
        if is_lookup && head.sources().iter().any(|source| source.is_disk()) {
            self.volume.lookup(n_tokens, lookup_bytes);
        }
        for event in &events {
            self.access(event);
        }
        self.events = events;
        Ok(())
    }

    fn access(&mut self, event: &Event) {
        self.n_accesses += 1;
        self.order.access(event);
        self.volume.access(event);
        self.seeks.access(event);
        self.coverage.access(event);
        self.spans.access(event);
        self.reuse.access(event);
        if event.phase == Phase::Generate {
            for window in &mut self.windows {
                window.access(event, self.units.size(event.unit));
            }
        }
    }

    fn end_pass(&mut self) {
        let Some(pass) = self.pass.take() else { return };
        self.order.end_pass();
        self.volume.end_pass(&pass);
        self.spans.end_pass(&pass);
        self.reuse.end_pass(&pass);
        if pass.phase == Phase::Generate {
            for window in &mut self.windows {
                window.end_pass(&pass);
            }
        }
    }

    fn finish(self, unresolved: Vec<Unresolved>) -> Option<AccessReport> {
        if self.n_accesses == 0 {
            return None;
        }
        let (phases, layers, lookups) = self.volume.finish();
        Some(AccessReport {
            order: self.order.finish(),
            phases,
            layers,
            lookups,
            seeks: self.seeks.finish(),
            working_sets: self
                .windows
                .into_iter()
                .map(WindowCounter::finish)
                .collect(),
            coverage: self.coverage.finish(&self.units),
            reuse: self.reuse.finish(&self.units),
            spans: self.spans.finish(),
            model_bytes: self.units.total_bytes(),
            unresolved,
        })
    }
}
