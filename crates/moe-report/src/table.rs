//! Encoding of tables as Snappy-compressed Parquet, in memory.

use std::sync::Arc;

use parquet::basic::{Compression, Encoding};
use parquet::data_type::{DoubleType, Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::ColumnPath;

/// Rows of a row group: the page decodes the table in slices of this size.
const ROW_GROUP: usize = 131_072;

/// Values of a column.
#[derive(Clone, Debug)]
enum Values {
    I32(Vec<i32>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// A column without null values.
#[derive(Clone, Debug)]
pub(crate) struct Column {
    name: String,
    values: Values,
    /// Delta encoding instead of a dictionary.
    is_delta: bool,
}

impl Column {
    /// Integers with few distinct values.
    pub fn dictionary(name: impl Into<String>, values: Vec<i32>) -> Column {
        Column {
            name: name.into(),
            values: Values::I32(values),
            is_delta: false,
        }
    }

    /// Integers that ascend or rarely repeat.
    pub fn delta(name: &str, values: Vec<i32>) -> Column {
        Column {
            name: name.to_owned(),
            values: Values::I32(values),
            is_delta: true,
        }
    }

    /// Times.
    pub fn times(name: &str, values: Vec<i64>) -> Column {
        Column {
            name: name.to_owned(),
            values: Values::I64(values),
            is_delta: true,
        }
    }

    /// Numbers with few distinct values.
    pub fn numbers(name: &str, values: Vec<f64>) -> Column {
        Column {
            name: name.to_owned(),
            values: Values::F64(values),
            is_delta: false,
        }
    }

    fn len(&self) -> usize {
        match &self.values {
            Values::I32(values) => values.len(),
            Values::I64(values) => values.len(),
            Values::F64(values) => values.len(),
        }
    }

    fn physical_type(&self) -> &'static str {
        match self.values {
            Values::I32(_) => "INT32",
            Values::I64(_) => "INT64",
            Values::F64(_) => "DOUBLE",
        }
    }
}

/// Encodes a table. All columns must have the same length.
pub(crate) fn encode(columns: &[Column]) -> Result<Vec<u8>, ParquetError> {
    let mut schema = String::from("message schema {");
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .set_created_by(concat!("moe-analyze ", env!("CARGO_PKG_VERSION")).to_owned());
    for column in columns {
        schema += &format!(" REQUIRED {} {};", column.physical_type(), column.name);
        if column.is_delta {
            let path = ColumnPath::from(column.name.as_str());
            properties = properties
                .set_column_dictionary_enabled(path.clone(), false)
                .set_column_encoding(path, Encoding::DELTA_BINARY_PACKED);
        }
    }
    schema.push_str(" }");
    let schema = Arc::new(parse_message_type(&schema)?);
    let properties = Arc::new(properties.build());
    let mut file = SerializedFileWriter::new(Vec::<u8>::new(), schema, properties)?;
    let n_rows = columns.first().map_or(0, Column::len);
    for start in (0..n_rows).step_by(ROW_GROUP) {
        let end = n_rows.min(start + ROW_GROUP);
        let mut group = file.next_row_group()?;
        for column in columns {
            let Some(mut writer) = group.next_column()? else {
                break;
            };
            match &column.values {
                Values::I32(values) => {
                    let writer = writer.typed::<Int32Type>();
                    writer.write_batch(&values[start..end], None, None)?;
                }
                Values::I64(values) => {
                    let writer = writer.typed::<Int64Type>();
                    writer.write_batch(&values[start..end], None, None)?;
                }
                Values::F64(values) => {
                    let writer = writer.typed::<DoubleType>();
                    writer.write_batch(&values[start..end], None, None)?;
                }
            }
            writer.close()?;
        }
        group.close()?;
    }
    file.into_inner()
}

#[cfg(test)]
mod tests {
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::RowAccessor;

    use super::*;

    /// Two row groups, with a delta column, times and numbers.
    #[test]
    fn encodes_all_rows_of_all_columns() {
        let n = ROW_GROUP + 3;
        let ids: Vec<i32> = (0..n).map(|i| i32::try_from(i % 7).unwrap()).collect();
        let routes: Vec<i32> = (0..n).map(|i| i32::try_from(i).unwrap() - 1).collect();
        let times: Vec<i64> = (0..n).map(|i| i64::try_from(i).unwrap() * 1000).collect();
        let bytes: Vec<f64> = (0..n)
            .map(|i| if i % 2 == 0 { 0.5 } else { -1.0 })
            .collect();
        let encoded = encode(&[
            Column::dictionary("token", ids),
            Column::delta("route", routes),
            Column::times("start", times),
            Column::numbers("bytes", bytes),
        ])
        .unwrap();
        let reader = SerializedFileReader::new(bytes_of(encoded)).unwrap();
        assert_eq!(reader.metadata().num_row_groups(), 2);
        let rows: Vec<_> = reader
            .get_row_iter(None)
            .unwrap()
            .map(Result::unwrap)
            .collect();
        assert_eq!(rows.len(), n);
        let last = &rows[n - 1];
        assert_eq!(
            last.get_int(0).unwrap(),
            i32::try_from((n - 1) % 7).unwrap()
        );
        assert_eq!(last.get_int(1).unwrap(), i32::try_from(n - 2).unwrap());
        assert_eq!(
            last.get_long(2).unwrap(),
            i64::try_from(n - 1).unwrap() * 1000
        );
        assert_eq!(last.get_double(3).unwrap(), 0.5);
    }

    fn bytes_of(encoded: Vec<u8>) -> std::fs::File {
        use std::io::{Seek, Write};

        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&encoded).unwrap();
        file.rewind().unwrap();
        file
    }
}
