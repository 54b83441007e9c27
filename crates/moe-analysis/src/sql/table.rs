//! A table: Parquet files with the same columns.

use std::path::Path;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use moe_trace::tables::TableMetadata;

use super::{Error, RUN_COLUMN};

/// Columns with identifiers that may use all 64 bits.
const UNSIGNED: [&str; 1] = ["buffer_id"];

/// Files and columns of a table.
#[derive(Clone, Default)]
pub(super) struct Table {
    files: Vec<TableFile>,
    /// Common columns of all files, with their SQL types, without [`RUN_COLUMN`].
    columns: Vec<Arc<Field>>,
}

#[derive(Clone)]
pub(super) struct TableFile {
    pub metadata: TableMetadata,
    /// Value of [`RUN_COLUMN`].
    pub run: Option<Arc<str>>,
}

/// A row group of a table.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub file: usize,
    pub group: usize,
    pub n_rows: u64,
}

impl Table {
    pub(super) fn add(&mut self, path: &Path, run: Option<&str>) -> Result<(), Error> {
        let metadata = TableMetadata::read(path)?;
        let fields = metadata.schema().fields();
        if let Some(first) = self.files.first() {
            let missing = |column: &&Arc<Field>| fields.find(column.name()).is_none();
            if let Some(column) = self.columns.iter().find(missing) {
                return Err(Error::Columns {
                    path: path.to_owned(),
                    column: column.name().clone(),
                    first: first.metadata.path().to_owned(),
                });
            }
        } else {
            let columns = fields.iter().filter_map(|field| {
                let data_type = sql_type(field.name(), field.data_type())?;
                Some(Arc::new(Field::new(field.name(), data_type, true)))
            });
            self.columns = columns
                .filter(|column| column.name() != RUN_COLUMN)
                .collect();
        }
        let run = run.map(Arc::from);
        self.files.push(TableFile { metadata, run });
        Ok(())
    }

    pub(super) fn has_run(&self) -> bool {
        self.files.iter().any(|file| file.run.is_some())
    }

    pub(super) fn file(&self, part: &Part) -> &TableFile {
        &self.files[part.file]
    }

    /// Columns of the files, with their SQL types.
    pub(super) fn columns(&self) -> &[Arc<Field>] {
        &self.columns
    }

    /// Columns with these names.
    pub(super) fn projected(&self, names: &[impl AsRef<str>]) -> SchemaRef {
        let is_wanted =
            |column: &&Arc<Field>| names.iter().any(|name| name.as_ref() == column.name());
        let columns: Vec<Arc<Field>> = self.columns.iter().filter(is_wanted).cloned().collect();
        Arc::new(Schema::new(columns))
    }

    pub(super) fn column_names(&self) -> Vec<&str> {
        let run = self.has_run().then_some(RUN_COLUMN);
        let columns = self.columns.iter().map(|column| column.name().as_str());
        run.into_iter().chain(columns).collect()
    }

    pub(super) fn parts(&self) -> Vec<Part> {
        let files = self.files.iter().enumerate();
        let parts = files.flat_map(|(file, TableFile { metadata, .. })| {
            (0..metadata.n_row_groups()).map(move |group| Part {
                file,
                group,
                n_rows: metadata.n_group_rows(group),
            })
        });
        parts.collect()
    }

    pub(super) fn n_rows(&self) -> u64 {
        let rows = self.files.iter().map(|file| file.metadata.n_rows());
        rows.fold(0, u64::saturating_add)
    }
}

/// SQL type of a column as an Arrow type; `None` if the type is not supported.
fn sql_type(name: &str, data_type: &DataType) -> Option<DataType> {
    use DataType::*;
    Some(match data_type {
        UInt64 if UNSIGNED.contains(&name) => UInt64,
        integer if integer.is_integer() => Int64,
        float if float.is_floating() => Float64,
        Boolean => Boolean,
        Utf8 | LargeUtf8 | Utf8View => names(),
        Dictionary(_, value) if matches!(**value, Utf8 | LargeUtf8 | Utf8View) => names(),
        _ => return None,
    })
}

/// Dictionary of strings, because most string columns have few distinct values.
fn names() -> DataType {
    DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8))
}
