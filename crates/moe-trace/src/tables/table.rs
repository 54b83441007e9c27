//! A table as a Parquet file. Row groups are encoded on any thread and appended in order.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use moe_files::{AtomicFile, NewDirectories};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_writer::{
    ArrowColumnChunk, ArrowColumnWriter, ArrowRowGroupWriterFactory, ArrowWriterOptions,
    compute_leaves,
};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::writer::SerializedFileWriter;

use super::rows::{Context, Rows};
use crate::error::Error;
use crate::operations::Operation;
use crate::parquet_file::properties;

/// Rows of a batch for the encoders.
const BATCH_ROWS: usize = 8 * 1024;

/// A table that is being written under a temporary name.
pub(crate) struct Table {
    /// Writes to a second handle, because `SerializedFileWriter::into_inner` hides why the last write failed.
    writer: SerializedFileWriter<File>,
    file: AtomicFile,
    rows: u64,
}

/// Creates encoders for a table's row groups, on any thread.
#[derive(Clone)]
pub(crate) struct EncoderFactory(Arc<ArrowRowGroupWriterFactory>);

/// Encodes a row group.
pub(crate) struct Encoder<R> {
    rows: R,
    n_rows: u64,
    columns: Vec<ArrowColumnWriter>,
}

/// An encoded row group.
pub(crate) struct RowGroup {
    n_rows: u64,
    columns: Vec<ArrowColumnChunk>,
}

impl Table {
    /// Creates the table's file and, if necessary, its directory.
    pub(crate) fn create<'a, R: Rows<'a>>(
        path: &Path,
        metadata: Vec<KeyValue>,
        force: bool,
        directories: &mut NewDirectories,
    ) -> Result<(Self, EncoderFactory), Error> {
        if let Some(dir) = path.parent() {
            directories.create(dir)?;
        }
        let file = AtomicFile::create(path, force)?;
        let options = ArrowWriterOptions::new().with_properties(properties(metadata, R::ASCENDING));
        let (writer, factory) =
            ArrowWriter::try_new_with_options(file.try_clone()?, R::schema().clone(), options)
                .and_then(ArrowWriter::into_serialized_writer)
                .map_err(Error::writing_table(path))?;
        let table = Self {
            writer,
            file,
            rows: 0,
        };
        Ok((table, EncoderFactory(Arc::new(factory))))
    }

    /// The final path.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Appends a row group. Empty ones are omitted.
    pub(crate) fn append(&mut self, row_group: RowGroup) -> Result<(), Error> {
        if row_group.n_rows == 0 {
            return Ok(());
        }
        self.rows += row_group.n_rows;
        self.write(row_group)
            .map_err(|error| Error::writing_table(self.path())(error))
    }

    fn write(&mut self, row_group: RowGroup) -> Result<(), ParquetError> {
        let mut writer = self.writer.next_row_group()?;
        for column in row_group.columns {
            column.append_to_row_group(&mut writer)?;
        }
        writer.close()?;
        Ok(())
    }

    /// Completes the file, which keeps its temporary name. Returns its number of rows.
    pub(crate) fn complete(mut self) -> Result<(AtomicFile, u64), Error> {
        let written = self.writer.finish();
        written.map_err(Error::writing_table(self.path()))?;
        Ok((self.file, self.rows))
    }
}

impl EncoderFactory {
    /// An encoder for the row group of `rows`.
    pub(crate) fn encoder<R>(&self, rows: R) -> Result<Encoder<R>, ParquetError> {
        // The index is used for encryption only.
        Ok(Encoder {
            rows,
            n_rows: 0,
            columns: self.0.create_column_writers(0)?,
        })
    }
}

impl<'a, R: Rows<'a>> Encoder<R> {
    /// Adds the rows of an operation.
    pub(crate) fn push(
        &mut self,
        op_index: u64,
        operation: &Operation<'a>,
        context: &Context<'_>,
    ) -> Result<(), Error> {
        self.rows.push(op_index, operation, context)?;
        if self.rows.len() >= BATCH_ROWS {
            self.encode_batch()
                .map_err(Error::writing_table(context.trace))?;
        }
        Ok(())
    }

    /// The row group.
    pub(crate) fn finish(mut self) -> Result<RowGroup, ParquetError> {
        self.encode_batch()?;
        let columns = self
            .columns
            .into_iter()
            .map(ArrowColumnWriter::close)
            .collect::<Result<_, _>>()?;
        Ok(RowGroup {
            n_rows: self.n_rows,
            columns,
        })
    }

    fn encode_batch(&mut self) -> Result<(), ParquetError> {
        if self.rows.len() == 0 {
            return Ok(());
        }
        let batch = self.rows.take()?;
        self.n_rows += batch.num_rows() as u64;
        // No column is nested, so each has one leaf column.
        let fields = R::schema().fields().iter().zip(batch.columns());
        for ((field, array), column) in fields.zip(&mut self.columns) {
            for leaf in compute_leaves(field, array)? {
                column.write(&leaf)?;
            }
        }
        Ok(())
    }
}
