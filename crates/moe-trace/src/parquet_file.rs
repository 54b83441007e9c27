//! What all Parquet files of this crate share: compression, metadata, dictionaries, and reading with the types expected.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, DictionaryArray, PrimitiveArray, RecordBatch, StringArray,
};
use arrow::compute::cast;
use arrow::datatypes::{ArrowPrimitiveType, DataType, Field, Int32Type, Schema, SchemaRef};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
    ParquetRecordBatchReaderBuilder,
};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::schema::types::ColumnPath;

use crate::error::Error;

/// Rows that a reader is handed at once.
const READ_ROWS: usize = 16 * 1024;

/// Metadata key of a table's schema and its version.
pub(crate) const SCHEMA_KEY: &str = "moe-analyze.schema";

/// Properties of every table: zstd, and who wrote what.
///
/// Columns of `ascending` hold values that grow from row to row, or rarely repeat: no dictionary helps them, differences do.
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

/// A key with its value.
pub(crate) fn key_value(key: &str, value: impl Into<String>) -> KeyValue {
    KeyValue::new(key.to_owned(), value.into())
}

/// The value of a key in a file's metadata.
pub(crate) fn metadata_value(path: &Path, key: &str) -> Result<Option<String>, Error> {
    let footer = footer(path)?;
    let entries = footer.metadata().file_metadata().key_value_metadata();
    let entry = entries.into_iter().flatten().find(|entry| entry.key == key);
    Ok(entry.and_then(|entry| entry.value.clone()))
}

/// The type of a column of names: a dictionary with signed keys, which every reader of Parquet takes.
pub(crate) fn name_type() -> DataType {
    DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8))
}

/// A column that is never null.
pub(crate) fn required(name: &str, data_type: DataType) -> Field {
    Field::new(name, data_type, false)
}

/// A column that may be null.
pub(crate) fn optional(name: &str, data_type: DataType) -> Field {
    Field::new(name, data_type, true)
}

/// Runs `read`, which decodes a file. The decoder panics on some damaged files; here that is an error like others.
pub(crate) fn guarded<T>(path: &Path, read: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
        let reason = "its pages contradict each other: the file is damaged, write it anew";
        Err(Error::Parquet {
            path: path.to_owned(),
            reason: reason.to_owned(),
        })
    })
}

/// What the footer of a file says.
pub(crate) fn footer(path: &Path) -> Result<ArrowReaderMetadata, Error> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    guarded(path, || {
        ArrowReaderMetadata::load(&file, ArrowReaderOptions::default())
            .map_err(Error::parquet(path))
    })
}

/// The next batch of a table that [`open`] opened, brought to `schema`.
pub(crate) fn next_batch(
    path: &Path,
    reader: &mut ParquetRecordBatchReader,
    schema: &SchemaRef,
) -> Result<Option<RecordBatch>, Error> {
    guarded(path, || {
        let Some(batch) = reader.next() else {
            return Ok(None);
        };
        let batch = batch.map_err(Error::parquet(path))?;
        conform(path, &batch, schema).map(Some)
    })
}

/// Opens a table for reading `schema`'s columns, whichever others it has.
pub(crate) fn open(path: &Path, schema: &Schema) -> Result<ParquetRecordBatchReader, Error> {
    let footer = footer(path)?;
    let row_groups = (0..footer.metadata().num_row_groups()).collect();
    open_row_groups(path, &footer, schema, row_groups)
}

/// Opens some row groups of a table whose footer was read, for `schema`'s columns.
pub(crate) fn open_row_groups(
    path: &Path,
    footer: &ArrowReaderMetadata,
    schema: &Schema,
    row_groups: Vec<usize>,
) -> Result<ParquetRecordBatchReader, Error> {
    // A file of its own: readers side by side would move each other's position.
    let file = File::open(path).map_err(Error::io("open", path))?;
    let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, footer.clone());
    let names = schema.fields().iter().map(|field| field.name().as_str());
    let mask = ProjectionMask::columns(builder.parquet_schema(), names);
    let rows = row_groups
        .iter()
        .map(|&index| builder.metadata().row_group(index).num_rows());
    let rows = usize::try_from(rows.fold(0i64, i64::saturating_add)).unwrap_or(READ_ROWS);
    builder
        .with_projection(mask)
        .with_row_groups(row_groups)
        // Room for a batch is made for each column of each row group.
        .with_batch_size(rows.clamp(1, READ_ROWS))
        .build()
        .map_err(Error::parquet(path))
}

/// Brings a batch to `schema`: columns by name, each cast to its type.
///
/// Other programs rewrite tables with other integer types and plain strings; what does not fit the type is an error.
fn conform(path: &Path, batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch, Error> {
    let columns = schema
        .fields()
        .iter()
        .map(|field| conform_column(batch, field))
        .collect::<Result<Vec<_>, String>>();
    let columns = columns.map_err(Error::parquet(path))?;
    RecordBatch::try_new(schema.clone(), columns).map_err(Error::parquet(path))
}

fn conform_column(batch: &RecordBatch, field: &Field) -> Result<ArrayRef, String> {
    let name = field.name();
    let column = batch
        .column_by_name(name)
        .ok_or_else(|| format!("no column {name}; this is not the table that is wanted"))?;
    let column = if column.data_type() == field.data_type() {
        column.clone()
    } else {
        let cast =
            cast(column, field.data_type()).map_err(|error| format!("column {name}: {error}"))?;
        if cast.null_count() > column.logical_null_count() {
            return Err(format!(
                "column {name}: a value does not fit {}; write the table anew",
                field.data_type()
            ));
        }
        cast
    };
    if !field.is_nullable() && column.logical_null_count() > 0 {
        return Err(format!(
            "column {name}: a value is missing; write the table anew"
        ));
    }
    Ok(column)
}

/// A column of numbers in a batch that [`conform`] made.
pub(crate) fn numbers<'a, T: ArrowPrimitiveType>(
    batch: &'a RecordBatch,
    name: &str,
) -> &'a PrimitiveArray<T> {
    batch
        .column_by_name(name)
        .map(|column| column.as_primitive())
        .expect("a conforming batch has the column")
}

/// A column of names in a batch that [`conform`] made: its keys, and their strings.
pub(crate) fn names<'a>(
    batch: &'a RecordBatch,
    name: &str,
) -> (&'a PrimitiveArray<Int32Type>, &'a StringArray) {
    let column: &DictionaryArray<Int32Type> = batch
        .column_by_name(name)
        .map(|column| column.as_dictionary())
        .expect("a conforming batch has the column");
    (column.keys(), column.values().as_string())
}

/// The values of a column of names, `null` for null.
///
/// # Errors
/// As of [`parsed_names`].
pub(crate) fn coded_names(
    batch: &RecordBatch,
    name: &str,
    of: impl Fn(&str) -> Option<u8>,
    null: u8,
) -> Result<Vec<u8>, String> {
    let (keys, strings) = names(batch, name);
    let codes: Vec<Option<u8>> = strings.iter().map(|string| string.and_then(&of)).collect();
    let mut is_known = true;
    let mut code = |key: i32| match codes.get(usize::try_from(key).unwrap_or(usize::MAX)) {
        Some(&Some(code)) => code,
        _ => {
            is_known = false;
            null
        }
    };
    let coded: Vec<u8> = match keys.null_count() {
        0 => keys.values().iter().map(|&key| code(key)).collect(),
        _ => keys.iter().map(|key| key.map_or(null, &mut code)).collect(),
    };
    if is_known {
        return Ok(coded);
    }
    // It says what is wrong.
    let parsed = parsed_names(batch, name, of)?;
    Ok(parsed
        .into_iter()
        .map(|code| code.unwrap_or(null))
        .collect())
}

/// The values of a column of names, each key looked up once: `of` turns a string into a value or says what is wrong.
pub(crate) fn parsed_names<V: Clone>(
    batch: &RecordBatch,
    name: &str,
    of: impl Fn(&str) -> Option<V>,
) -> Result<Vec<Option<V>>, String> {
    let (keys, strings) = names(batch, name);
    let values: Vec<Option<V>> = strings.iter().map(|string| string.and_then(&of)).collect();
    keys.iter()
        .map(|key| {
            let Some(key) = key else { return Ok(None) };
            let key = usize::try_from(key).unwrap_or(usize::MAX);
            match values.get(key) {
                Some(Some(value)) => Ok(Some(value.clone())),
                _ if key < strings.len() => Err(format!(
                    "column {name}: {:?} is not known; write the table anew",
                    strings.value(key)
                )),
                _ => Err(format!("column {name}: a key lies outside its dictionary")),
            }
        })
        .collect()
}

/// A dictionary column from keys and the strings that they count in.
pub(crate) fn dictionary(keys: PrimitiveArray<Int32Type>, strings: &Arc<StringArray>) -> ArrayRef {
    Arc::new(DictionaryArray::new(keys, strings.clone()))
}
