//! Comparison of two recorded runs: routing, operations, bytes read.
//!
//! The runs may be of different engines, quantizations or settings. Passes are matched by their tokens (sequence, phase,
//! position), independent of batch sizes and of the order of sequences. Operations are matched by name, because the
//! operation numbers of two engines may differ.

mod bytes;
mod manifest;
mod operations;
mod passes;
mod routing;

use std::path::PathBuf;

use moe_trace::Run;

pub use bytes::{BytesDiff, LayerBytes, RangeDifference, RangeDifferenceKind, RangeReads};
pub use manifest::ManifestDifference;
pub use operations::{OperationKinds, OperationsDiff, SourceAspect, SourceDifference};
pub use routing::{LayerRouting, RoutingDiff, RoutingDifference, RoutingDifferenceKind};

use bytes::BytesComparer;
use operations::OperationsComparer;
use passes::{Steps, passes};
use routing::RoutingComparer;

/// Reason why two runs cannot be compared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The trace contains more tensors than any model.
    #[error(
        "{} contains more than {limit} ranges of weights, more than any model has; the trace is damaged",
        path.display()
    )]
    TooManyRanges {
        /// The run.
        path: PathBuf,
        /// Maximum number of ranges.
        limit: usize,
    },
    /// One run has no sequence numbers, the other run has several sequences.
    #[error(
        "{}: the records do not contain sequence numbers (plain TensorAccessLog v4), and {} has {n_sequences} sequences, so the \
         tokens cannot be matched; compare runs of one sequence",
        path.display(),
        other.display()
    )]
    UnknownSequences {
        /// The run without sequence numbers.
        path: PathBuf,
        /// The other run.
        other: PathBuf,
        /// Number of sequences in the other run.
        n_sequences: usize,
    },
}

/// Options of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct DiffOptions {
    /// Compare the selected experts of each token in each layer.
    pub routing: bool,
    /// Compare operations and their sources.
    pub operations: bool,
    /// Compare the weights that are read.
    pub bytes: bool,
    /// Maximum number of rows, and of byte ranges, that the report lists for each kind of difference.
    pub limit: usize,
    /// Maximum absolute difference of two router weights that count as equal.
    pub weight_tolerance: f64,
}

impl Default for DiffOptions {
    fn default() -> Self {
        DiffOptions {
            routing: true,
            operations: true,
            bytes: true,
            limit: 10,
            weight_tolerance: 0.0,
        }
    }
}

/// Differences between two runs. Parts that were not compared are `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiffReport {
    /// Manifest fields that differ. They may explain differences, but do not make runs unequal.
    pub manifest: Vec<ManifestDifference>,
    /// Selected experts of each token in each layer.
    pub routing: Option<RoutingDiff>,
    /// Operations and their sources.
    pub operations: Option<OperationsDiff>,
    /// Weights that were read.
    pub bytes: Option<BytesDiff>,
}

impl DiffReport {
    /// Whether all compared parts are equal.
    pub fn is_equal(&self) -> bool {
        self.routing.as_ref().is_none_or(RoutingDiff::is_equal)
            && self
                .operations
                .as_ref()
                .is_none_or(OperationsDiff::is_equal)
            && self.bytes.as_ref().is_none_or(BytesDiff::is_equal)
    }
}

/// Compares the runs `a` and `b`. Reads both traces in parallel steps; memory holds an index of the passes, the current pass
/// and the differences.
///
/// # Errors
/// [`Error::TooManyRanges`] for a damaged trace, [`Error::UnknownSequences`] if only one trace has sequence numbers, and
/// several.
pub fn diff(a: &Run, b: &Run, options: &DiffOptions) -> Result<DiffReport, Error> {
    let runs = [a, b];
    let (limit, tolerance) = (options.limit, options.weight_tolerance);
    let mut routing = options
        .routing
        .then(|| RoutingComparer::new(runs, limit, tolerance));
    let mut operations = options.operations.then(|| OperationsComparer::new(runs));
    let mut bytes = options.bytes.then(|| BytesComparer::new(runs, limit));
    let mut passes = runs.map(passes);
    for side in [0, 1] {
        passes::name_sequence(&mut passes, side).map_err(|n_sequences| {
            Error::UnknownSequences {
                path: runs[side].path.clone(),
                other: runs[1 - side].path.clone(),
                n_sequences,
            }
        })?;
    }
    let [passes_a, passes_b] = passes;
    for step in Steps::new(&passes_a, &passes_b) {
        if let Some(routing) = &mut routing {
            routing.step(&step);
        }
        if let Some(operations) = &mut operations {
            operations.step(&step);
        }
        if let Some(bytes) = &mut bytes {
            bytes.step(&step)?;
        }
    }
    Ok(DiffReport {
        manifest: manifest::differences(runs.map(|run| run.manifest.as_ref())),
        routing: routing.map(RoutingComparer::finish),
        operations: operations.map(OperationsComparer::finish),
        bytes: bytes.map(BytesComparer::finish),
    })
}
