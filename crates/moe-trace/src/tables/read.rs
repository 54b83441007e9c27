//! Reading the table `routing`.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, Float32Array, RecordBatch, UInt32Array, UInt64Array};
use arrow::buffer::ScalarBuffer;
use arrow::datatypes::{SchemaRef, UInt16Type, UInt32Type};
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReader};

use super::dataset::dataset_parts;
use super::routing::{COUNTING, READ_ROUTING};
use crate::error::Error;
use crate::parquet_columns::{coded_names, numbers};
use crate::parquet_file;
use crate::phase::Phase;
use crate::record::lane;
use crate::sink::is_router_weight;
use crate::table_fault::TableFault;

/// Reads a `routing` table: a Parquet file, a directory with `routing.parquet`, or a dataset with `routing/run=ID/*.parquet`.
///
/// Tables of other programs are also accepted if they have the columns.
///
/// # Errors
/// [`TableFault::NoRouting`] for a directory without such files; [`Error::Io`]. Damaged files are errors of the iterator.
pub fn read_routing(path: impl AsRef<Path>) -> Result<RoutingReader, Error> {
    let mut files = routing_paths(path.as_ref())?;
    files.reverse();
    Ok(RoutingReader {
        files,
        current: None,
    })
}

/// The files that [`read_routing`] would read, for reading in parts.
///
/// # Errors
/// [`Error::Table`] for a directory without such files, or a file that is damaged; [`Error::Io`].
pub fn routing_files(path: impl AsRef<Path>) -> Result<Vec<RoutingFile>, Error> {
    let paths = routing_paths(path.as_ref())?.into_iter();
    let files = paths.map(|path| {
        Ok(RoutingFile {
            footer: parquet_file::footer(&path)?,
            path: path.into(),
        })
    });
    files.collect()
}

/// A file of a `routing` table. Its parts (row groups) can be read in parallel.
#[derive(Clone, Debug)]
pub struct RoutingFile {
    path: Arc<Path>,
    footer: ArrowReaderMetadata,
}

impl RoutingFile {
    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of parts (row groups).
    pub fn n_parts(&self) -> usize {
        self.footer.metadata().num_row_groups()
    }

    /// Reads the rows of a part, with the columns that counting needs. `part` is an index below [`RoutingFile::n_parts`].
    ///
    /// # Errors
    /// [`Error::Table`] for a file that is damaged or lacks a column; [`Error::Io`]. Damaged pages are errors of the iterator.
    pub fn read_part(
        &self,
        part: usize,
    ) -> Result<impl Iterator<Item = Result<CountingBatch, Error>>, Error> {
        let path = self.path.clone();
        let mut reader = parquet_file::open_row_groups(&path, &self.footer, &COUNTING, vec![part])?;
        let groups = self.footer.metadata().row_groups().iter().take(part);
        let before = groups.map(|group| u64::try_from(group.num_rows()).unwrap_or(0));
        let mut first_row = before.fold(0, u64::saturating_add);
        Ok(std::iter::from_fn(move || {
            let batch = next(&path, &mut reader, &COUNTING)?;
            Some(batch.and_then(|batch| CountingBatch::new(&path, batch, &mut first_row)))
        }))
    }
}

/// The batches of a `routing` table, in the order of files and rows.
pub struct RoutingReader {
    /// Files that are not read yet, in reverse order.
    files: Vec<PathBuf>,
    /// The file that is being read, and the number of its rows so far.
    current: Option<(Arc<Path>, ParquetRecordBatchReader, u64)>,
}

impl Iterator for RoutingReader {
    type Item = Result<RoutingBatch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some((file, reader, n_rows)) = &mut self.current {
                if let Some(batch) = next(file, reader, &READ_ROUTING) {
                    return Some(batch.and_then(|batch| RoutingBatch::new(file, batch, n_rows)));
                }
                self.current = None;
            }
            let file: Arc<Path> = self.files.pop()?.into();
            match parquet_file::open(&file, &READ_ROUTING) {
                Ok(reader) => self.current = Some((file, reader, 0)),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

fn next(
    file: &Path,
    reader: &mut ParquetRecordBatchReader,
    schema: &SchemaRef,
) -> Option<Result<RecordBatch, Error>> {
    parquet_file::next_batch(file, reader, schema).transpose()
}

/// Rows of `routing` with the columns that counting needs. Each column has [`CountingBatch::len`] values.
#[derive(Clone, Debug)]
pub struct CountingBatch {
    file: Arc<Path>,
    batch: RecordBatch,
    phase: Vec<Option<Phase>>,
    timestamp_ns: ScalarBuffer<u64>,
}

impl CountingBatch {
    /// `batch` must have the columns of [`COUNTING`]. `n_rows` is the number of rows before it in the file; its rows are added.
    fn new(file: &Arc<Path>, batch: RecordBatch, n_rows: &mut u64) -> Result<Self, Error> {
        check_weights(numbers(&batch, "weight"), *n_rows).map_err(Error::table(file))?;
        *n_rows += batch.num_rows() as u64;
        let phase = |name: &str| Phase::from_name(name).map(Some);
        Ok(Self {
            phase: coded_names(&batch, "phase", phase, None).map_err(Error::table(file))?,
            timestamp_ns: times(numbers(&batch, "timestamp_ns")),
            file: file.clone(),
            batch,
        })
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.batch.num_rows()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file of the rows. In a dataset, a file belongs to one run.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Phase of the token; `None` if the original trace does not contain it.
    pub fn phase(&self) -> &[Option<Phase>] {
        &self.phase
    }

    /// Position of the token in its sequence.
    pub fn token_id(&self) -> &[u32] {
        numbers::<UInt32Type>(&self.batch, "token_id").values()
    }

    /// Sequence of the token; null if the original trace does not contain it.
    pub fn sequence_id(&self) -> &UInt32Array {
        numbers(&self.batch, "sequence_id")
    }

    /// Layer.
    pub fn layer_id(&self) -> &[u16] {
        numbers::<UInt16Type>(&self.batch, "layer_id").values()
    }

    /// Rank of the expert in the token's top-k; 0 is the best.
    pub fn slot(&self) -> &[u16] {
        numbers::<UInt16Type>(&self.batch, "slot").values()
    }

    /// Id of the expert in its layer.
    pub fn expert_id(&self) -> &[u32] {
        numbers::<UInt32Type>(&self.batch, "expert_id").values()
    }

    /// Router weight as applied; null if the original trace does not contain it.
    pub fn weight(&self) -> &Float32Array {
        numbers(&self.batch, "weight")
    }

    /// Start of the operation in nanoseconds; equal for all tokens of a batch in a layer. 0 if the original trace does not contain it.
    pub fn timestamp_ns(&self) -> &[u64] {
        &self.timestamp_ns
    }
}

/// Rows of `routing` with all columns: those of [`CountingBatch`] and the lane.
#[derive(Clone, Debug)]
pub struct RoutingBatch {
    counting: CountingBatch,
    lane: Vec<u8>,
}

impl Deref for RoutingBatch {
    type Target = CountingBatch;

    fn deref(&self) -> &CountingBatch {
        &self.counting
    }
}

impl RoutingBatch {
    /// `batch` must have all columns of the table. `n_rows` is that of [`CountingBatch::new`].
    fn new(file: &Arc<Path>, batch: RecordBatch, n_rows: &mut u64) -> Result<Self, Error> {
        let lane = |name: &str| number(&lane::NAMES, name);
        Ok(Self {
            lane: coded_names(&batch, "lane", lane, lane::UNKNOWN).map_err(Error::table(file))?,
            counting: CountingBatch::new(file, batch, n_rows)?,
        })
    }

    /// Where the expert was computed, a [`lane`]; [`lane::UNKNOWN`] if the original trace does not contain it.
    pub fn lane(&self) -> &[u8] {
        &self.lane
    }
}

/// Checks the weights of rows that follow `first_row` rows of the file.
fn check_weights(column: &Float32Array, first_row: u64) -> Result<(), TableFault> {
    let is_valid = |weight: Option<f32>| weight.is_none_or(is_router_weight);
    match column.iter().position(|weight| !is_valid(weight)) {
        None => Ok(()),
        Some(i) => Err(TableFault::Weight {
            row: first_row + i as u64,
            weight: column.value(i),
        }),
    }
}

/// The values of a column of times; null becomes 0.
fn times(column: &UInt64Array) -> ScalarBuffer<u64> {
    if column.null_count() == 0 {
        return column.values().clone();
    }
    column.iter().map(Option::unwrap_or_default).collect()
}

/// Index of `name` in `names`.
fn number(names: &[&str], name: &str) -> Option<u8> {
    names
        .iter()
        .position(|&n| n == name)
        .and_then(|i| u8::try_from(i).ok())
}

/// The files of a `routing` table, sorted by name; at least one.
fn routing_paths(path: &Path) -> Result<Vec<PathBuf>, Error> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let table = path.join("routing.parquet");
    if table.is_file() {
        return Ok(vec![table]);
    }
    let files = dataset_parts(path, "routing")?;
    if files.is_empty() {
        return Err(Error::table(path)(TableFault::NoRouting));
    }
    Ok(files)
}
