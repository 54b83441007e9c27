//! Columns of all Parquet tables of this crate: field types, conversion of a batch to the expected schema, and values.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, DictionaryArray, PrimitiveArray, RecordBatch, RecordBatchOptions,
    StringArray, new_null_array,
};
use arrow::datatypes::{ArrowPrimitiveType, DataType, Field, Int32Type, SchemaRef};

use crate::parquet_types::convert;
use crate::table_fault::TableFault;

/// The type of a column of names: a dictionary with signed keys, which all Parquet readers support.
pub(crate) fn name_type() -> DataType {
    DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8))
}

/// A column that is not nullable.
pub(crate) fn required(name: &str, data_type: DataType) -> Field {
    Field::new(name, data_type, false)
}

/// A nullable column.
pub(crate) fn optional(name: &str, data_type: DataType) -> Field {
    Field::new(name, data_type, true)
}

/// Marks a field of a schema for [`conform`]: the column may be missing in a table; its values are then null.
const MAY_BE_ABSENT: &str = "may_be_absent";

/// The field of a column that may be missing in a table.
pub(crate) fn may_be_absent(field: &Field) -> Field {
    let metadata = HashMap::from([(MAY_BE_ABSENT.to_owned(), String::new())]);
    field.clone().with_nullable(true).with_metadata(metadata)
}

/// Converts a batch to `schema`: columns by name, each converted to its type.
///
/// Other programs rewrite tables with other integer types and plain strings. A value that does not fit the type is an error.
pub(crate) fn conform(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch, TableFault> {
    let columns = schema
        .fields()
        .iter()
        .map(|field| conform_column(batch, field))
        .collect::<Result<Vec<_>, _>>()?;
    // The row count is needed for a schema without columns.
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options)
        .map_err(TableFault::damaged)
}

fn conform_column(batch: &RecordBatch, field: &Field) -> Result<ArrayRef, TableFault> {
    let name = || field.name().clone();
    let fields = batch.schema_ref().fields().iter();
    let mut columns = fields
        .zip(batch.columns())
        .filter(|(of, _)| of.name() == field.name());
    let column = match (columns.next(), columns.next()) {
        (Some((_, column)), None) => column,
        (Some(_), Some(_)) => return Err(TableFault::RepeatedColumn { column: name() }),
        (None, _) if field.metadata().contains_key(MAY_BE_ABSENT) => {
            return Ok(new_null_array(field.data_type(), batch.num_rows()));
        }
        (None, _) => return Err(TableFault::NoColumn { column: name() }),
    };
    let column = if column.data_type() == field.data_type() {
        column.clone()
    } else {
        let converted = convert(column, field.data_type()).ok_or_else(|| TableFault::Type {
            column: name(),
            from: column.data_type().clone(),
            to: field.data_type().clone(),
        })?;
        if converted.null_count() > column.logical_null_count() {
            return Err(TableFault::Range {
                column: name(),
                data_type: field.data_type().clone(),
            });
        }
        converted
    };
    if !field.is_nullable() && column.logical_null_count() > 0 {
        return Err(TableFault::Null { column: name() });
    }
    Ok(column)
}

/// A column of numbers in a batch that [`conform`] returned.
pub(crate) fn numbers<'a, T: ArrowPrimitiveType>(
    batch: &'a RecordBatch,
    name: &str,
) -> &'a PrimitiveArray<T> {
    batch
        .column_by_name(name)
        .map(|column| column.as_primitive())
        .expect("a conforming batch has the column")
}

/// A column of names in a batch that [`conform`] returned: its keys and the strings of the dictionary.
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

/// The values of a column of names. A null becomes the value `null`.
///
/// # Errors
/// Those of [`parsed_names`].
pub(crate) fn coded_names<C: Copy>(
    batch: &RecordBatch,
    name: &str,
    of: impl Fn(&str) -> Option<C>,
    null: C,
) -> Result<Vec<C>, TableFault> {
    let (keys, strings) = names(batch, name);
    let codes: Vec<Option<C>> = strings.iter().map(|string| string.and_then(&of)).collect();
    let mut is_known = true;
    let mut code = |key: i32| match codes.get(usize::try_from(key).unwrap_or(usize::MAX)) {
        Some(&Some(code)) => code,
        _ => {
            is_known = false;
            null
        }
    };
    let coded: Vec<C> = match keys.null_count() {
        0 => keys.values().iter().map(|&key| code(key)).collect(),
        _ => keys.iter().map(|key| key.map_or(null, &mut code)).collect(),
    };
    if is_known {
        return Ok(coded);
    }
    // Returns the error with the cause.
    let parsed = parsed_names(batch, name, of)?;
    Ok(parsed
        .into_iter()
        .map(|code| code.unwrap_or(null))
        .collect())
}

/// The values of a column of names. `of` converts each string of the dictionary once; `None` from it is an error.
pub(crate) fn parsed_names<V: Clone>(
    batch: &RecordBatch,
    name: &str,
    of: impl Fn(&str) -> Option<V>,
) -> Result<Vec<Option<V>>, TableFault> {
    let (keys, strings) = names(batch, name);
    let values: Vec<Option<V>> = strings.iter().map(|string| string.and_then(&of)).collect();
    keys.iter()
        .map(|key| {
            let Some(key) = key else { return Ok(None) };
            let key = usize::try_from(key).unwrap_or(usize::MAX);
            match values.get(key) {
                Some(Some(value)) => Ok(Some(value.clone())),
                _ if key < strings.len() => Err(TableFault::Name {
                    column: name.to_owned(),
                    name: strings.value(key).to_owned(),
                }),
                _ => Err(TableFault::Key {
                    column: name.to_owned(),
                }),
            }
        })
        .collect()
}

/// A dictionary column from keys and strings.
pub(crate) fn dictionary(keys: PrimitiveArray<Int32Type>, strings: &Arc<StringArray>) -> ArrayRef {
    Arc::new(DictionaryArray::new(keys, strings.clone()))
}
