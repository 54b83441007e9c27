//! Opening a run directory or a bare trace.

use std::ops::Range;
use std::path::{Path, PathBuf};

use moe_gguf::map::OffsetMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::Error;
use crate::first_of_layer::RoutingOperations;
use crate::manifest::Manifest;
#[cfg(feature = "parquet")]
use crate::map_table;
use crate::ops::{self, OpTable};
use crate::pass_table::PassTable;
use crate::trace::Trace;

/// Name of the trace in a run directory.
pub const TRACE_FILE: &str = "trace.bin";

/// A run directory, or a bare `trace.bin`.
#[derive(Debug)]
pub struct Run {
    /// The path that was opened.
    pub path: PathBuf,
    /// The manifest; `None` for a bare trace.
    pub manifest: Option<Manifest>,
    /// The records.
    pub trace: Trace,
    /// The model's offset map; `None` for a bare trace, and without the feature `parquet`.
    pub map: Option<OffsetMap>,
    /// Operation numbers of a trace without manifest, if they differ from the default.
    bare_ops: Option<OpTable>,
    /// Positions of the tokens, if the records do not contain them (traces of other tools).
    passes: Option<PassTable>,
}

impl Run {
    /// Opens a run directory, or a bare `trace.bin` (which then has no manifest and no map).
    ///
    /// # Errors
    /// [`Error::NotARun`] for a directory without `trace.bin`; those of [`Manifest::of_run`] and [`Trace::open`]. With the feature
    /// `parquet`, also `Error::Table` for an offset map that cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref().to_owned();
        if !path.is_dir() {
            return Ok(Self::from_trace(Trace::open(path)?));
        }
        let trace = path.join(TRACE_FILE);
        if !trace.exists() {
            return Err(Error::NotARun { path });
        }
        let manifest = Manifest::of_run(&path)?;
        #[cfg(feature = "parquet")]
        let map = Some(path.join(map_table::FILE_NAME))
            .filter(|path| path.exists())
            .map(|path| map_table::read(&path))
            .transpose()?;
        #[cfg(not(feature = "parquet"))]
        let map = None;
        Ok(Self {
            manifest,
            trace: Trace::open(&trace)?,
            map,
            path,
            bare_ops: None,
            passes: None,
        })
    }

    /// A bare trace, which has no manifest and no map.
    pub fn from_trace(trace: Trace) -> Self {
        Self {
            path: trace.path().to_owned(),
            manifest: None,
            trace,
            map: None,
            bare_ops: None,
            passes: None,
        }
    }

    /// Sets the operation numbers of a trace without manifest.
    #[must_use]
    pub fn with_ops(mut self, ops: OpTable) -> Self {
        self.bare_ops = Some(ops);
        self
    }

    /// Adds the passes of a trace whose records do not contain the positions of their tokens.
    #[must_use]
    pub fn with_passes(mut self, passes: PassTable) -> Self {
        self.passes = Some(passes);
        self
    }

    /// The passes that [`Run::with_passes`] added.
    pub fn passes(&self) -> Option<&PassTable> {
        self.passes.as_ref()
    }

    /// Operation numbers of the trace.
    pub fn ops(&self) -> &OpTable {
        let manifest = self.manifest.as_ref().map(|manifest| &manifest.ops);
        manifest
            .or(self.bare_ops.as_ref())
            .unwrap_or(ops::default_table())
    }

    /// The operations that contain the routing: one for each layer of each pass, instead of three for gate, up and down.
    ///
    /// [`Operation::tokens`](crate::Operation::tokens) returns their tokens with the selected experts.
    pub fn routing(&self) -> RoutingOperations<'_> {
        RoutingOperations::new(self.trace.operations(), self.ops().number("MUL_MAT_ID"))
    }

    /// Like [`Run::routing`], for the operations in `records` only; see [`Trace::operations_in`].
    pub fn routing_in(&self, records: Range<u64>) -> RoutingOperations<'_> {
        let operations = self.trace.operations_in(records);
        RoutingOperations::new(operations, self.ops().number("MUL_MAT_ID"))
    }

    /// The id of the run in datasets: the manifest's `run_id`, in which other characters than ASCII letters, digits, `.`, `_`
    /// and `-` become `_`. Without a `run_id`: `trace-` and a hash over the trace's size and its first MiB.
    pub fn id(&self) -> String {
        if let Some(manifest) = &self.manifest
            && !manifest.run_id.is_empty()
        {
            return manifest.safe_run_id();
        }
        let bytes = self.trace.bytes();
        let head = xxh3_64(&bytes[..bytes.len().min(1 << 20)]);
        format!("trace-{:016x}", head ^ (bytes.len() as u64).rotate_left(32))
    }
}
