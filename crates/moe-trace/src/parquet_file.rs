//! Common parts of all Parquet files of this crate: writer properties, metadata, and reading with an expected schema.

use std::cell::Cell;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
    ParquetRecordBatchReaderBuilder,
};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::schema::types::ColumnPath;

use serde::de::DeserializeOwned;

use crate::bounded;
use crate::error::Error;
use crate::parquet_columns::conform;
use crate::parquet_pages;
use crate::table_fault::TableFault;

/// Maximum size of a footer that is read, in bytes. Decoded, it takes up to 150 times as much memory.
const MAX_FOOTER: u64 = 16 << 20;
/// Rows of a batch when reading.
const READ_ROWS: usize = 16 * 1024;

/// Metadata key of a table's schema name with version.
pub const SCHEMA_KEY: &str = "moe-analyze.schema";

/// Writer properties of all tables: zstd compression, `created_by` and metadata.
///
/// Values in the columns `ascending` increase from row to row or rarely repeat, so they are delta-encoded without a dictionary.
pub(crate) fn properties(metadata: Vec<KeyValue>, ascending: &[&str]) -> WriterProperties {
    let mut builder = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_created_by(concat!("moe-analyze ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_key_value_metadata(Some(metadata));
    for &name in ascending {
        let column = ColumnPath::from(name);
        builder = builder
            .set_column_dictionary_enabled(column.clone(), false)
            .set_column_encoding(column, Encoding::DELTA_BINARY_PACKED);
    }
    builder.build()
}

/// A metadata entry.
pub(crate) fn key_value(key: &str, value: impl Into<String>) -> KeyValue {
    KeyValue::new(key.to_owned(), value.into())
}

/// The footer of a Parquet file: schema, row counts, and text values by key.
#[derive(Clone, Debug)]
pub struct TableMetadata {
    path: PathBuf,
    footer: ArrowReaderMetadata,
}

impl TableMetadata {
    /// Reads the footer of a Parquet file.
    ///
    /// # Errors
    /// [`Error::Table`] for a file that is damaged or not a Parquet file; [`Error::Io`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        Ok(Self {
            path: path.to_owned(),
            footer: footer(path)?,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of rows according to the footer.
    pub fn n_rows(&self) -> u64 {
        let n_rows = self.footer.metadata().file_metadata().num_rows();
        u64::try_from(n_rows).unwrap_or(0)
    }

    /// Number of row groups.
    pub fn n_row_groups(&self) -> usize {
        self.footer.metadata().num_row_groups()
    }

    /// Names of the columns.
    pub fn columns(&self) -> Vec<&str> {
        let fields = self.footer.schema().fields().iter();
        fields.map(|field| field.name().as_str()).collect()
    }

    /// Number of rows of a row group according to the footer.
    pub fn n_group_rows(&self, group: usize) -> u64 {
        let n_rows = self.footer.metadata().row_group(group).num_rows();
        u64::try_from(n_rows).unwrap_or(0)
    }

    /// Names and types of the columns.
    pub fn schema(&self) -> &SchemaRef {
        self.footer.schema()
    }

    /// Reads the rows of a row group: the columns of `schema` by name, each cast to the type in `schema`.
    ///
    /// # Errors
    /// [`Error::Table`] for a damaged file, a missing column or a value that does not fit its type; [`Error::Io`].
    pub fn read_group(
        &self,
        group: usize,
        schema: &SchemaRef,
    ) -> Result<impl Iterator<Item = Result<RecordBatch, Error>>, Error> {
        let (path, schema) = (self.path.clone(), schema.clone());
        let mut reader = open_row_groups(&path, &self.footer, &schema, vec![group])?;
        Ok(std::iter::from_fn(move || {
            next_batch(&path, &mut reader, &schema).transpose()
        }))
    }

    /// Decodes all rows of all columns and returns their number.
    ///
    /// # Errors
    /// [`Error::Table`] for a damaged file, or if a column cannot be decoded within the limits.
    pub fn decode_rows(&self) -> Result<u64, Error> {
        let row_groups = (0..self.n_row_groups()).collect();
        let mask = ProjectionMask::all();
        let mut reader = open_columns(&self.path, &self.footer, mask, row_groups)?;
        let mut n_rows = 0;
        let failed = Error::table(&self.path);
        while let Some(batch) = decoder(|| reader.next().transpose()).map_err(&failed)? {
            n_rows += batch.num_rows() as u64;
        }
        Ok(n_rows)
    }

    /// The metadata value of a key.
    pub fn value(&self, key: &str) -> Option<&str> {
        let entries = self.footer.metadata().file_metadata().key_value_metadata();
        let entry = entries.into_iter().flatten().find(|entry| entry.key == key);
        entry.and_then(|entry| entry.value.as_deref())
    }

    /// The metadata value of a key, parsed as JSON.
    ///
    /// # Errors
    /// [`TableFault::Metadata`] for a value that is not the expected JSON.
    pub fn json<T: DeserializeOwned>(&self, key: &'static str) -> Result<Option<T>, Error> {
        let value = self.value(key).map(serde_json::from_str).transpose();
        value.map_err(|source| {
            let source = Arc::new(source);
            Error::table(&self.path)(TableFault::Metadata { key, source })
        })
    }
}

thread_local! {
    /// Whether this thread is executing the Parquet decoder.
    static IS_DECODING: Cell<bool> = const { Cell::new(false) };
}

/// Runs `decode`, which must only call the Parquet decoder. The decoder panics on some damaged files
/// (apache/arrow-rs#2855, apache/arrow-rs#7806); such a panic becomes [`TableFault::DecoderPanicked`].
///
/// The first call wraps the program's panic hook, so that the message of such a panic is not printed. Other panics are
/// not affected. With `panic = "abort"` nothing is caught.
fn decoder<T, E: Into<ParquetError>>(
    decode: impl FnOnce() -> Result<T, E>,
) -> Result<T, TableFault> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_DECODING.get() {
                print(panic);
            }
        }));
    });
    IS_DECODING.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(decode));
    IS_DECODING.set(false);
    match outcome {
        Ok(decoded) => decoded.map_err(TableFault::damaged),
        Err(_) => Err(TableFault::DecoderPanicked),
    }
}

/// Reads and decodes the footer of a file.
pub(crate) fn footer(path: &Path) -> Result<ArrowReaderMetadata, Error> {
    let mut file = bounded::open(path)?;
    let bytes = footer_bytes(&mut file).map_err(Error::io("read", path))?;
    if bytes > MAX_FOOTER {
        let limit = MAX_FOOTER;
        return Err(Error::table(path)(TableFault::Footer { bytes, limit }));
    }
    decoder(|| ArrowReaderMetadata::load(&file, ArrowReaderOptions::default()))
        .map_err(Error::table(path))
}

/// Size of a file's footer in bytes, from its last eight bytes; 0 if these are not the end of a Parquet file.
fn footer_bytes(file: &mut File) -> std::io::Result<u64> {
    let size = file.metadata()?.len();
    let Some(start) = size.checked_sub(8) else {
        return Ok(0);
    };
    let mut end = [0; 8];
    file.seek(SeekFrom::Start(start))?;
    file.read_exact(&mut end)?;
    let [a, b, c, d, magic @ ..] = end;
    let is_parquet = &magic == b"PAR1";
    // The decoder reports a footer that is longer than its file.
    Ok(if is_parquet {
        u64::from(u32::from_le_bytes([a, b, c, d])).min(size)
    } else {
        0
    })
}

/// The next batch of a table that [`open`] opened, converted to `schema`.
pub(crate) fn next_batch(
    path: &Path,
    reader: &mut ParquetRecordBatchReader,
    schema: &SchemaRef,
) -> Result<Option<RecordBatch>, Error> {
    let batch = decoder(|| reader.next().transpose()).map_err(Error::table(path))?;
    batch
        .map(|batch| conform(&batch, schema))
        .transpose()
        .map_err(Error::table(path))
}

/// Opens a table for reading the columns of `schema`. Other columns are ignored.
pub(crate) fn open(path: &Path, schema: &Schema) -> Result<ParquetRecordBatchReader, Error> {
    let footer = footer(path)?;
    let row_groups = (0..footer.metadata().num_row_groups()).collect();
    open_row_groups(path, &footer, schema, row_groups)
}

/// Opens some row groups of a table for reading the columns of `schema`.
pub(crate) fn open_row_groups(
    path: &Path,
    footer: &ArrowReaderMetadata,
    schema: &Schema,
    row_groups: Vec<usize>,
) -> Result<ParquetRecordBatchReader, Error> {
    let names = schema.fields().iter().map(|field| field.name().as_str());
    let mask = ProjectionMask::columns(footer.parquet_schema(), names);
    open_columns(path, footer, mask, row_groups)
}

/// Opens some columns of some row groups, after checking that their pages fit in memory.
fn open_columns(
    path: &Path,
    footer: &ArrowReaderMetadata,
    mask: ProjectionMask,
    row_groups: Vec<usize>,
) -> Result<ParquetRecordBatchReader, Error> {
    // A separate file handle: concurrent readers of one handle would move each other's position.
    let mut file = bounded::open(path)?;
    let metadata = footer.metadata();
    let most_rows = parquet_pages::check(&mut file, metadata, &mask, &row_groups)
        .map_err(Error::table(path))?
        .min(READ_ROWS);
    let rows = row_groups
        .iter()
        .map(|&index| metadata.row_group(index).num_rows());
    let rows = usize::try_from(rows.fold(0i64, i64::saturating_add)).unwrap_or(READ_ROWS);
    let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, footer.clone())
        .with_projection(mask)
        .with_row_groups(row_groups)
        // The decoder allocates a batch for each column of each row group.
        .with_batch_size(rows.clamp(1, most_rows));
    decoder(|| builder.build()).map_err(Error::table(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn converts_only_decoder_panics_to_faults() {
        let panicking = || -> Result<(), ParquetError> { panic!("of the decoder") };
        assert!(matches!(
            decoder(panicking),
            Err(TableFault::DecoderPanicked)
        ));
        assert!(!IS_DECODING.get());
        // Code that uses a decoded value is outside the decoder.
        let ours = catch_unwind(|| decoder(|| Ok::<_, ParquetError>(0)).map(|n| 1 / n));
        assert!(ours.is_err());
    }
}
