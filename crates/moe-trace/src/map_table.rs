//! `gguf-map.parquet`: the offset map of a model, with one row for each tensor, or for each expert of a stacked tensor.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use arrow::array::{
    ArrayRef, RecordBatch, StringDictionaryBuilder, UInt16Array, UInt32Array, UInt64Array,
};
use arrow::datatypes::{
    DataType, Int32Type, Schema, SchemaRef, UInt16Type, UInt32Type, UInt64Type,
};
use moe_files::AtomicFile;
use moe_gguf::map::{Category, MapRow, OffsetMap, Projection};
use moe_gguf::{ExpertId, GgmlType, LayerId};
use parquet::arrow::ArrowWriter;
use parquet::file::metadata::KeyValue;

use crate::error::Error;
use crate::manifest::{Manifest, Model, ModelFile};
use crate::parquet_columns::{self, name_type, numbers, optional, parsed_names, required};
use crate::parquet_file::{self, key_value};
use crate::table_fault::TableFault;
use crate::tables::{MODEL_KEY, RUN_ID_KEY, TableMetadata};

/// Name of the file in a run directory.
pub const FILE_NAME: &str = "gguf-map.parquet";
/// Schema name with version in the file's metadata.
pub const SCHEMA: &str = "moe-analyze.gguf-map.v1";
/// Metadata key of the model's files, a JSON array of `{name, size_bytes}`. The column `file` is an index into it.
pub const FILES_KEY: &str = "moe-analyze.files";

/// Maximum number of rows of a map that is read, seven times as many as the largest current model has.
const MAX_ROWS: usize = 1 << 20;
/// Maximum length of a tensor name in a map that is read, in bytes. The limit of GGUF files is 63.
const MAX_NAME: usize = 255;
/// Rows that are converted to columns at a time. It bounds the memory, because a small header can claim many experts.
const BATCH_ROWS: usize = 1 << 14;

const PROJECTIONS: [Projection; 4] = [
    Projection::Gate,
    Projection::Up,
    Projection::Down,
    Projection::GateUp,
];

static COLUMNS: LazyLock<SchemaRef> = LazyLock::new(|| {
    Arc::new(Schema::new(vec![
        required("file", DataType::UInt16),
        required("tensor", name_type()),
        required("tensor_idx", DataType::UInt32),
        optional("expert_id", DataType::UInt32),
        optional("layer_id", DataType::UInt16),
        optional("projection", name_type()),
        required("category", name_type()),
        required("type", name_type()),
        required("ne0", DataType::UInt64),
        required("ne1", DataType::UInt64),
        required("ne2", DataType::UInt64),
        required("ne3", DataType::UInt64),
        required("file_offset", DataType::UInt64),
        required("size_bytes", DataType::UInt64),
    ]))
});

/// The model of a map, from the map's metadata.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Identity {
    /// The model's files; empty if unknown.
    pub files: Vec<ModelFile>,
    /// The model, if the map belongs to a run.
    pub model: Option<Model>,
}

/// Writes the map of a model with these `files`. `force` allows the replacement of an existing `path`.
///
/// # Errors
/// [`Error::Exists`] if `path` exists and `force` is not set; [`Error::Io`], [`Error::Table`] or [`Error::Output`] if the file
/// cannot be written.
pub fn write(path: &Path, map: &OffsetMap, files: &[ModelFile], force: bool) -> Result<(), Error> {
    Ok(prepare(path, map, files, force)?.commit()?)
}

/// Like [`write()`], but `path` does not change until the returned file is committed.
///
/// # Errors
/// Those of [`write()`].
pub fn prepare(
    path: &Path,
    map: &OffsetMap,
    files: &[ModelFile],
    force: bool,
) -> Result<AtomicFile, Error> {
    write_pending(path, map, files_metadata(path, files)?, force)
}

/// Writes the map of a run, with run and model in its metadata. `path` does not change until the file is committed.
pub(crate) fn write_for_run(
    path: &Path,
    map: &OffsetMap,
    manifest: &Manifest,
) -> Result<AtomicFile, Error> {
    let mut metadata = files_metadata(path, &manifest.model.files)?;
    let model = serde_json::to_string(&manifest.model).map_err(Error::json("map", path))?;
    metadata.push(key_value(RUN_ID_KEY, manifest.safe_run_id()));
    metadata.push(key_value(MODEL_KEY, model));
    write_pending(path, map, metadata, true)
}

fn files_metadata(path: &Path, files: &[ModelFile]) -> Result<Vec<KeyValue>, Error> {
    let files = serde_json::to_string(files).map_err(Error::json("map", path))?;
    Ok(vec![
        key_value(parquet_file::SCHEMA_KEY, SCHEMA),
        key_value(FILES_KEY, files),
    ])
}

fn write_pending(
    path: &Path,
    map: &OffsetMap,
    metadata: Vec<KeyValue>,
    force: bool,
) -> Result<AtomicFile, Error> {
    let file = AtomicFile::create(path, force)?;
    // A second handle, because `ArrowWriter::into_inner` hides why the last write failed.
    let mut writer = ArrowWriter::try_new(
        file.try_clone()?,
        COLUMNS.clone(),
        Some(parquet_file::properties(metadata, &[])),
    )
    .map_err(Error::writing_table(path))?;
    for rows in map.rows.chunks(BATCH_ROWS) {
        let batch = RecordBatch::try_new(COLUMNS.clone(), columns(rows))
            .map_err(Error::writing_table(path))?;
        writer.write(&batch).map_err(Error::writing_table(path))?;
    }
    writer.close().map_err(Error::writing_table(path))?;
    Ok(file)
}

/// The model of a map, as far as the map's metadata contains it.
///
/// # Errors
/// [`Error::Table`] for a damaged file or metadata that is not JSON; [`Error::Io`].
pub fn identity(path: &Path) -> Result<Identity, Error> {
    let metadata = TableMetadata::read(path)?;
    Ok(Identity {
        files: metadata.json(FILES_KEY)?.unwrap_or_default(),
        model: metadata.json(MODEL_KEY)?,
    })
}

/// Reads a map.
///
/// # Errors
/// [`Error::Table`] for a file that is damaged, is not a map, or has too many rows; [`Error::Io`].
pub fn read(path: &Path) -> Result<OffsetMap, Error> {
    let mut rows = Vec::new();
    let mut reader = parquet_file::open(path, &COLUMNS)?;
    while let Some(batch) = parquet_file::next_batch(path, &mut reader, &COLUMNS)? {
        if rows.len() + batch.num_rows() > MAX_ROWS {
            return Err(Error::table(path)(TableFault::Rows { limit: MAX_ROWS }));
        }
        read_rows(&batch, &mut rows).map_err(Error::table(path))?;
    }
    Ok(OffsetMap { rows })
}

fn columns(rows: &[MapRow]) -> Vec<ArrayRef> {
    let u64s = |of: fn(&MapRow) -> u64| {
        Arc::new(UInt64Array::from_iter_values(rows.iter().map(of))) as ArrayRef
    };
    vec![
        Arc::new(UInt16Array::from_iter_values(
            rows.iter().map(|row| row.file),
        )),
        names(rows.iter().map(|row| Some(&*row.tensor))),
        Arc::new(UInt32Array::from_iter_values(
            rows.iter().map(|row| row.tensor_idx),
        )),
        Arc::new(UInt32Array::from_iter(
            rows.iter().map(|row| row.expert_id.map(|id| id.0)),
        )),
        Arc::new(UInt16Array::from_iter(
            rows.iter().map(|row| row.layer_id.map(|id| id.0)),
        )),
        names(
            rows.iter()
                .map(|row| row.projection.map(Projection::as_str)),
        ),
        names(rows.iter().map(|row| Some(row.category.as_str()))),
        names(rows.iter().map(|row| Some(row.ty.name()))),
        u64s(|row| row.ne[0]),
        u64s(|row| row.ne[1]),
        u64s(|row| row.ne[2]),
        u64s(|row| row.ne[3]),
        u64s(|row| row.file_offset),
        u64s(|row| row.size_bytes),
    ]
}

fn names<'a>(values: impl Iterator<Item = Option<&'a str>>) -> ArrayRef {
    let mut builder = StringDictionaryBuilder::<Int32Type>::new();
    builder.extend(values);
    Arc::new(builder.finish())
}

fn read_rows(batch: &RecordBatch, rows: &mut Vec<MapRow>) -> Result<(), TableFault> {
    let (_, tensors) = parquet_columns::names(batch, "tensor");
    let longest = tensors.iter().flatten().map(str::len).max().unwrap_or(0);
    if longest > MAX_NAME {
        return Err(TableFault::LongName {
            column: "tensor".to_owned(),
            bytes: longest,
            limit: MAX_NAME,
        });
    }
    let u64s = |name| numbers::<UInt64Type>(batch, name).values();
    let file = numbers::<UInt16Type>(batch, "file").values();
    let tensor_idx = numbers::<UInt32Type>(batch, "tensor_idx").values();
    let ne = [u64s("ne0"), u64s("ne1"), u64s("ne2"), u64s("ne3")];
    let file_offset = u64s("file_offset");
    let size_bytes = u64s("size_bytes");
    let mut expert_id = numbers::<UInt32Type>(batch, "expert_id").iter();
    let mut layer_id = numbers::<UInt16Type>(batch, "layer_id").iter();
    let tensor = parsed_names(batch, "tensor", |name| Some(Arc::<str>::from(name)))?;
    let projection = parsed_names(batch, "projection", |name| {
        PROJECTIONS.into_iter().find(|p| p.as_str() == name)
    })?;
    let category = parsed_names(batch, "category", |name| {
        Category::ALL.into_iter().find(|c| c.as_str() == name)
    })?;
    let ty = parsed_names(batch, "type", |name| {
        GgmlType::ALL.iter().copied().find(|ty| ty.name() == name)
    })?;
    let missing = |name: &str| TableFault::Null {
        column: name.to_owned(),
    };
    for i in 0..batch.num_rows() {
        let size_bytes = size_bytes[i];
        let file_offset = file_offset[i];
        file_offset
            .checked_add(size_bytes)
            .ok_or(TableFault::Overflow { row: i })?;
        rows.push(MapRow {
            file: file[i],
            tensor: tensor[i].clone().ok_or_else(|| missing("tensor"))?,
            tensor_idx: tensor_idx[i],
            expert_id: expert_id.next().flatten().map(ExpertId),
            layer_id: layer_id.next().flatten().map(LayerId),
            projection: projection[i],
            category: category[i].ok_or_else(|| missing("category"))?,
            ty: ty[i].ok_or_else(|| missing("type"))?,
            ne: ne.map(|column| column[i]),
            file_offset,
            size_bytes,
        });
    }
    Ok(())
}
