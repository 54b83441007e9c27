//! Where two recorded runs differ: routing, operations, bytes.
//!
//! The runs may be of two engines, of two quantizations of a model, or of two settings. Passes are matched by the tokens
//! that they evaluate (sequence, phase, position), so that other batches or another order of sequences do not matter;
//! operations by their names, as the numbers of two engines may differ.

mod bytes;
mod manifest;
mod operations;
mod passes;
mod routing;

use std::path::PathBuf;

use moe_trace::Run;

pub use bytes::{BytesDiff, LayerBytes, RangeDifference, RangeKind, RangeReads};
pub use manifest::Fact;
pub use operations::{OperationKinds, OperationsDiff, SourceAspect, SourceDifference};
pub use routing::{LayerRouting, RoutingDiff, RowDifference, RowKind};

use bytes::BytesComparer;
use operations::OperationsComparer;
use passes::{Steps, passes};
use routing::RoutingComparer;

/// Why two runs could not be compared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A trace that names more tensors than a model can have.
    #[error(
        "{} names more than {limit} ranges of weights, more than any model has; the trace is damaged: look at it with `moe-analyze info`",
        path.display()
    )]
    TooManyRanges {
        /// The run.
        path: PathBuf,
        /// The most ranges that are compared.
        limit: usize,
    },
    /// The tokens of a run have no sequences, and those of the other have several.
    #[error(
        "{}: its records do not contain the sequences of their tokens (plain v4 records), and {} has {n_sequences} sequences: \
         it is unknown which tokens are the same; compare runs of one sequence",
        path.display(),
        other.display()
    )]
    UnknownSequences {
        /// The run without sequences.
        path: PathBuf,
        /// The other run.
        other: PathBuf,
        /// Sequences of the other run.
        n_sequences: usize,
    },
}

/// What to compare.
#[derive(Clone, Copy, Debug)]
pub struct DiffOptions {
    /// Compare the experts of each token in each layer.
    pub routing: bool,
    /// Compare the operations and their sources.
    pub operations: bool,
    /// Compare the weights that were read.
    pub bytes: bool,
    /// Differing rows that are listed, and differing ranges of each kind.
    pub limit: usize,
    /// Router weights that are this close count as equal.
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

/// Where two runs differ; what was not compared is absent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DiffReport {
    /// What the manifests tell differently. It explains differences and is none: runs of two engines can be equal.
    pub manifest: Vec<Fact>,
    /// The experts of each token in each layer.
    pub routing: Option<RoutingDiff>,
    /// The operations and their sources.
    pub operations: Option<OperationsDiff>,
    /// The weights that were read.
    pub bytes: Option<BytesDiff>,
}

impl DiffReport {
    /// Whether nothing that was compared differs.
    pub fn is_equal(&self) -> bool {
        self.routing.as_ref().is_none_or(RoutingDiff::is_equal)
            && self
                .operations
                .as_ref()
                .is_none_or(OperationsDiff::is_equal)
            && self.bytes.as_ref().is_none_or(BytesDiff::is_equal)
    }
}

/// Compares the run `a` with the run `b`. Both traces are read in step; what is held is an index of their passes, the
/// pass at hand, and what was found.
///
/// # Errors
/// [`Error::TooManyRanges`] for a damaged trace, [`Error::UnknownSequences`] for a trace without sequences next to one with several.
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
        manifest: manifest::facts(runs.map(|run| run.manifest.as_ref())),
        routing: routing.map(RoutingComparer::finish),
        operations: operations.map(OperationsComparer::finish),
        bytes: bytes.map(BytesComparer::finish),
    })
}
