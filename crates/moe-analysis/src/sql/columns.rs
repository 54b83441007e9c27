//! Conversion of Arrow columns from the reader to polars columns.

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes as read;
use polars::prelude::*;

/// The polars type of a column of a [`Table`](super::table::Table).
pub(super) fn polars_type(data_type: &read::DataType) -> DataType {
    match data_type {
        read::DataType::Int64 => DataType::Int64,
        read::DataType::UInt64 => DataType::UInt64,
        read::DataType::Float64 => DataType::Float64,
        read::DataType::Boolean => DataType::Boolean,
        _ => DataType::String,
    }
}

/// Converts a column that has one of the types of a [`Table`](super::table::Table).
pub(super) fn column(name: &str, array: &ArrayRef) -> PolarsResult<Column> {
    let name = PlSmallStr::from_str(name);
    Ok(match array.data_type() {
        read::DataType::Int64 => numbers::<read::Int64Type, Int64Type>(name, array),
        read::DataType::UInt64 => numbers::<read::UInt64Type, UInt64Type>(name, array),
        read::DataType::Float64 => numbers::<read::Float64Type, Float64Type>(name, array),
        read::DataType::Boolean => {
            let values = array.as_boolean().iter();
            BooleanChunked::from_iter_options(name, values).into_column()
        }
        _ => strings(name, array)?,
    })
}

fn numbers<R, P>(name: PlSmallStr, array: &ArrayRef) -> Column
where
    R: read::ArrowPrimitiveType,
    P: PolarsNumericType<Native = R::Native>,
    ChunkedArray<P>: IntoColumn,
{
    let array = array.as_primitive::<R>();
    match array.null_count() {
        0 => ChunkedArray::<P>::from_vec(name, array.values().to_vec()).into_column(),
        _ => ChunkedArray::<P>::from_iter_options(name, array.iter()).into_column(),
    }
}

/// Converts a dictionary to strings that share the bytes of its values.
fn strings(name: PlSmallStr, array: &ArrayRef) -> PolarsResult<Column> {
    let array = array.as_dictionary::<read::Int32Type>();
    let values = array.values().as_string::<i32>().iter();
    let values = StringChunked::from_iter_options(name, values);
    // The reader has checked that the keys are not negative.
    let keys = array.keys().iter().map(|key| key.map(|key| key as IdxSize));
    let keys = IdxCa::from_iter_options(PlSmallStr::EMPTY, keys);
    Ok(values.take(&keys)?.into_column())
}
