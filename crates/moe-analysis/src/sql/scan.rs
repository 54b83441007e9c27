//! A table as a polars source, which reads only the columns and rows that a query needs.

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use polars::prelude::*;
use rayon::prelude::*;

use super::columns::{column, polars_type};
use super::table::{Part, Table};
use super::{Error, QueryOptions, RUN_COLUMN};

/// State that all scans of a query share.
pub(super) struct Session {
    /// Counter of the rows that have been read.
    n_read: Arc<AtomicU64>,
    /// The reader's error. polars keeps only its text.
    failed: Mutex<Option<moe_trace::Error>>,
}

impl Session {
    pub(super) fn new(options: &QueryOptions) -> Self {
        Self {
            n_read: options.n_read.clone(),
            failed: Mutex::default(),
        }
    }

    /// Stores the reader's error and returns a polars error.
    fn fail(&self, error: moe_trace::Error) -> PolarsError {
        let text = error.to_string();
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        PolarsError::ComputeError(text.into())
    }

    /// The reader's error if it caused `error`, otherwise `error`.
    pub(super) fn explain(&self, error: Error) -> Error {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.take().map_or(error, Error::Trace)
    }
}

/// A scan of some parts (row groups) of a table.
#[derive(Clone)]
pub(super) struct Scan {
    table: Arc<Table>,
    schema: SchemaRef,
    parts: Arc<[Part]>,
    session: Arc<Session>,
    /// Rows in memory, of a scan that every step of a query repeats.
    memo: Option<Arc<Mutex<Option<Memo>>>>,
}

struct Memo {
    columns: Option<Arc<[PlSmallStr]>>,
    predicate: Option<Expr>,
    n_rows: Option<usize>,
    rows: DataFrame,
}

/// A table as a lazy frame.
pub(super) fn frame(table: &Table, session: &Arc<Session>) -> PolarsResult<LazyFrame> {
    let run = table
        .has_run()
        .then(|| (RUN_COLUMN.into(), DataType::String));
    let columns = table.columns().iter();
    let columns = columns.map(|field| (field.name().into(), polars_type(field.data_type())));
    let scan = Scan {
        schema: Arc::new(run.into_iter().chain(columns).collect()),
        parts: table.parts().into(),
        table: Arc::new(table.clone()),
        session: session.clone(),
        memo: None,
    };
    Arc::new(scan).plan().map(LazyFrame::from)
}

impl Scan {
    /// The scan that a plan node refers to.
    pub(super) fn of(plan: &DslPlan) -> Option<Arc<Scan>> {
        let DslPlan::Scan { scan_type, .. } = plan else {
            return None;
        };
        let FileScanDsl::Anonymous { function, .. } = &**scan_type else {
            return None;
        };
        let source: &Source = function.as_any().downcast_ref()?;
        Some(source.0.clone())
    }

    /// The plan node of the scan.
    pub(super) fn plan(self: &Arc<Self>) -> PolarsResult<DslPlan> {
        let args = ScanArgsAnonymous {
            schema: Some(self.schema.clone()),
            name: "TABLE",
            ..Default::default()
        };
        let frame = LazyFrame::anonymous_scan(Arc::new(Source(self.clone())), args)?;
        Ok(frame.logical_plan)
    }

    pub(super) fn n_rows(&self) -> u64 {
        self.parts
            .iter()
            .fold(0, |sum, part| sum.saturating_add(part.n_rows))
    }

    /// A scan of the same rows that keeps them in memory.
    pub(super) fn memoized(&self) -> Arc<Scan> {
        Arc::new(Scan {
            memo: Some(Arc::default()),
            ..self.clone()
        })
    }

    /// Ranges of parts with at most `step_rows` rows each, if the parts are small enough.
    pub(super) fn steps(&self, step_rows: u64) -> Vec<Range<usize>> {
        let mut steps = Vec::new();
        let (mut start, mut n_rows) = (0, 0u64);
        for (i, part) in self.parts.iter().enumerate() {
            n_rows = n_rows.saturating_add(part.n_rows);
            if n_rows >= step_rows {
                steps.push(start..i + 1);
                (start, n_rows) = (i + 1, 0);
            }
        }
        if start < self.parts.len() || steps.is_empty() {
            steps.push(start..self.parts.len());
        }
        steps
    }

    /// A scan of some of the parts.
    pub(super) fn step(&self, parts: Range<usize>) -> Arc<Scan> {
        Arc::new(Scan {
            parts: self.parts[parts].into(),
            ..self.clone()
        })
    }

    fn read(&self, args: &AnonymousScanArgs) -> PolarsResult<DataFrame> {
        let all: Vec<PlSmallStr>;
        let columns = match &args.with_columns {
            Some(columns) => &**columns,
            None => {
                all = self.schema.iter_names_cloned().collect();
                &all
            }
        };
        let predicate = args.predicate.as_ref();
        let frames: Vec<DataFrame> = match args.n_rows {
            None => {
                let parts = self.parts.par_iter();
                let frames = parts.map(|part| self.read_part(part, columns, predicate, usize::MAX));
                frames.collect::<PolarsResult<_>>()?
            }
            Some(mut rest) => {
                let mut frames = Vec::new();
                for part in self.parts.iter() {
                    if rest == 0 {
                        break;
                    }
                    let frame = self.read_part(part, columns, None, rest)?;
                    rest = rest.saturating_sub(frame.height());
                    frames.push(filtered(frame, predicate)?);
                }
                frames
            }
        };
        let mut rows = match columns {
            [] => DataFrame::empty(),
            _ => DataFrame::empty_with_schema(&self.schema.try_project(columns)?),
        };
        stack(&mut rows, frames)?;
        Ok(rows)
    }

    /// Rows of one part, at most the first `limit`.
    fn read_part(
        &self,
        part: &Part,
        columns: &[PlSmallStr],
        predicate: Option<&Expr>,
        limit: usize,
    ) -> PolarsResult<DataFrame> {
        let file = self.table.file(part);
        if columns.is_empty() {
            let n_rows = usize::try_from(part.n_rows).unwrap_or(usize::MAX);
            return DataFrame::new(n_rows.min(limit), Vec::new());
        }
        let schema = self.table.projected(columns);
        let fail = |error| self.session.fail(error);
        let mut frames = Vec::new();
        let mut rest = limit;
        for batch in file
            .metadata
            .read_group(part.group, &schema)
            .map_err(fail)?
        {
            let batch = batch.map_err(fail)?;
            let n_read = &self.session.n_read;
            n_read.fetch_add(batch.num_rows() as u64, Ordering::Relaxed);
            let n_rows = batch.num_rows().min(rest);
            let batch = batch.slice(0, n_rows);
            let columns = columns.iter().map(|name| match batch.column_by_name(name) {
                Some(array) => column(name, array),
                None => Ok(self.run_column(file.run.as_deref(), n_rows)),
            });
            let frame = DataFrame::new(n_rows, columns.collect::<PolarsResult<_>>()?)?;
            frames.push(filtered(frame, predicate)?);
            rest -= n_rows;
            if rest == 0 {
                break;
            }
        }
        let mut rows = DataFrame::empty_with_schema(&self.schema.try_project(columns)?);
        stack(&mut rows, frames)?;
        rows.rechunk_mut();
        Ok(rows)
    }

    fn run_column(&self, run: Option<&str>, n_rows: usize) -> Column {
        let run = run.map_or(AnyValue::Null, AnyValue::String).into_static();
        Column::new_scalar(
            RUN_COLUMN.into(),
            Scalar::new(DataType::String, run),
            n_rows,
        )
    }
}

/// Rows for which a predicate is true.
fn filtered(frame: DataFrame, predicate: Option<&Expr>) -> PolarsResult<DataFrame> {
    match predicate {
        Some(predicate) => frame.lazy().filter(predicate.clone()).collect(),
        None => Ok(frame),
    }
}

/// Appends the rows of frames with the same columns.
fn stack(rows: &mut DataFrame, frames: Vec<DataFrame>) -> PolarsResult<()> {
    for frame in frames {
        rows.vstack_mut_owned(frame)?;
    }
    Ok(())
}

/// A scan in the interface of polars.
struct Source(Arc<Scan>);

impl AnonymousScan for Source {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn allows_predicate_pushdown(&self) -> bool {
        true
    }

    fn allows_projection_pushdown(&self) -> bool {
        true
    }

    fn scan(&self, args: AnonymousScanArgs) -> PolarsResult<DataFrame> {
        let Some(memo) = &self.0.memo else {
            return self.0.read(&args);
        };
        let lock = || memo.lock().unwrap_or_else(PoisonError::into_inner);
        let known = lock().as_ref().and_then(|memo| {
            let is_same = memo.columns == args.with_columns
                && memo.predicate == args.predicate
                && memo.n_rows == args.n_rows;
            is_same.then(|| memo.rows.clone())
        });
        if let Some(rows) = known {
            return Ok(rows);
        }
        // Must not hold the lock: another thread that waits for the lock may be needed to read.
        let rows = self.0.read(&args)?;
        *lock() = Some(Memo {
            columns: args.with_columns,
            predicate: args.predicate,
            n_rows: args.n_rows,
            rows: rows.clone(),
        });
        Ok(rows)
    }
}
