//! Conversion of columns that another program rewrote with other types. Unlike the general `cast` of arrow, which adds 3 MB to a program,
//! it contains only the types of this crate's tables and of SQL.

use std::sync::Arc;

use arrow::array::{
    AnyDictionaryArray, Array, ArrayRef, AsArray, BooleanArray, DictionaryArray, PrimitiveArray,
    StringDictionaryBuilder,
};
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type,
    Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use num_traits::{NumCast, ToPrimitive, cast};

/// Converts a column to a type. Values that do not fit become null. `None` if values of its type are not converted.
pub(crate) fn convert(column: &dyn Array, to: &DataType) -> Option<ArrayRef> {
    Some(match to {
        DataType::Int64 => Arc::new(numbers::<Int64Type>(column)?),
        DataType::UInt8 => Arc::new(numbers::<UInt8Type>(column)?),
        DataType::UInt16 => Arc::new(numbers::<UInt16Type>(column)?),
        DataType::UInt32 => Arc::new(numbers::<UInt32Type>(column)?),
        DataType::UInt64 => Arc::new(numbers::<UInt64Type>(column)?),
        DataType::Float32 => Arc::new(numbers::<Float32Type>(column)?),
        DataType::Float64 => Arc::new(numbers::<Float64Type>(column)?),
        DataType::Boolean => Arc::new(booleans(column)?),
        DataType::Dictionary(keys, _) if **keys == DataType::Int32 => Arc::new(names(column)?),
        _ => return None,
    })
}

/// Numbers of any type, or of a dictionary of numbers. Fractions do not fit integers. Truth values are not numbers.
fn numbers<T: ArrowPrimitiveType<Native: NumCast>>(
    column: &dyn Array,
) -> Option<PrimitiveArray<T>> {
    fn number<S: NumCast + Copy, T: ArrowPrimitiveType<Native: NumCast>>(
        value: S,
    ) -> Option<T::Native> {
        let number: T::Native = cast(value)?;
        let is_equal = !T::DATA_TYPE.is_integer() || number.to_f64() == value.to_f64();
        is_equal.then_some(number)
    }
    macro_rules! from {
        ($($source:ident),*) => {
            match column.data_type() {
                $(&$source::DATA_TYPE => Some(column.as_primitive::<$source>().unary_opt(number::<_, T>)),)*
                DataType::Dictionary(..) => {
                    let dictionary = column.as_any_dictionary();
                    let values = numbers::<T>(dictionary.values().as_ref())?;
                    let value = |key: Option<usize>| {
                        key.filter(|&key| values.is_valid(key)).map(|key| values.value(key))
                    };
                    Some(keys(dictionary).into_iter().map(value).collect())
                }
                _ => None,
            }
        };
    }
    from!(
        Int8Type,
        Int16Type,
        Int32Type,
        Int64Type,
        UInt8Type,
        UInt16Type,
        UInt32Type,
        UInt64Type,
        Float16Type,
        Float32Type,
        Float64Type
    )
}

/// Truth values: numbers other than 0 are true.
fn booleans(column: &dyn Array) -> Option<BooleanArray> {
    let values = numbers::<Float64Type>(column)?;
    Some(values.iter().map(|value| Some(value? != 0.0)).collect())
}

/// Strings, or a dictionary of strings, as a dictionary.
fn names(column: &dyn Array) -> Option<DictionaryArray<Int32Type>> {
    let mut builder = StringDictionaryBuilder::<Int32Type>::new();
    if let DataType::Dictionary(..) = column.data_type() {
        let dictionary = column.as_any_dictionary();
        let names: Vec<Option<&str>> = strings(dictionary.values().as_ref())?.collect();
        for key in keys(dictionary) {
            builder.append_option(key.and_then(|key| names[key]));
        }
    } else {
        strings(column)?.for_each(|name| builder.append_option(name));
    }
    Some(builder.finish())
}

/// The key of each row of a dictionary; `None` for a null.
fn keys(dictionary: &dyn AnyDictionaryArray) -> Vec<Option<usize>> {
    if dictionary.values().is_empty() {
        return vec![None; dictionary.len()];
    }
    let keys = dictionary.normalized_keys().into_iter().enumerate();
    keys.map(|(row, key)| dictionary.is_valid(row).then_some(key))
        .collect()
}

fn strings<'a>(column: &'a dyn Array) -> Option<Box<dyn Iterator<Item = Option<&'a str>> + 'a>> {
    Some(match column.data_type() {
        DataType::Utf8 => Box::new(column.as_string::<i32>().iter()),
        DataType::LargeUtf8 => Box::new(column.as_string::<i64>().iter()),
        DataType::Utf8View => Box::new(column.as_string_view().iter()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use arrow::array::{
        Float64Array, Int8Array, Int64Array, LargeStringArray, StringArray, StringViewArray,
        UInt64Array, new_null_array,
    };
    use arrow::compute;

    use super::*;

    fn name_type() -> DataType {
        DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8))
    }

    /// Columns of all supported types.
    fn columns() -> Vec<ArrayRef> {
        let numbers: Vec<Option<i64>> =
            vec![Some(0), None, Some(1), Some(255), Some(-1), Some(70_000)];
        let keys = Int8Array::from(vec![Some(1), None, Some(0), Some(2)]);
        let values = Arc::new(Int64Array::from(vec![Some(300), Some(5), None]));
        vec![
            Arc::new(Int64Array::from(numbers)),
            Arc::new(Int8Array::from(vec![Some(-128), None, Some(127)])),
            Arc::new(UInt64Array::from(vec![u64::MAX, 0, 1 << 40])),
            Arc::new(Float64Array::from(vec![
                0.0,
                -1.0,
                2.0,
                1e30,
                f64::NAN,
                f64::INFINITY,
            ])),
            Arc::new(DictionaryArray::<Int8Type>::new(keys, values)),
            new_null_array(
                &DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Int64)),
                2,
            ),
        ]
    }

    #[test]
    fn numbers_equal_those_of_arrow() {
        let types = [
            DataType::Int64,
            DataType::UInt8,
            DataType::UInt16,
            DataType::UInt32,
            DataType::UInt64,
            DataType::Float32,
            DataType::Float64,
            DataType::Boolean,
        ];
        for (column, to) in columns()
            .iter()
            .flat_map(|column| types.iter().map(move |to| (column, to)))
        {
            let expected = compute::cast(column, to).unwrap();
            let converted = convert(column.as_ref(), to).unwrap();
            assert_eq!(&converted, &expected, "{} to {to}", column.data_type());
        }
    }

    #[test]
    fn fractions_do_not_fit_integers() {
        let column = Float64Array::from(vec![Some(0.9), Some(-0.9), None, Some(7.0)]);
        let integers = convert(&column, &DataType::UInt16).unwrap();
        let integers: Vec<_> = integers.as_primitive::<UInt16Type>().iter().collect();
        assert_eq!(integers, [None, None, None, Some(7)]);
        let floats = convert(&column, &DataType::Float32).unwrap();
        let floats: Vec<_> = floats.as_primitive::<Float32Type>().iter().collect();
        assert_eq!(floats, [Some(0.9), Some(-0.9), None, Some(7.0)]);
    }

    #[test]
    fn names_equal_those_of_arrow() {
        let names = vec![Some("a"), None, Some("b"), Some("a"), Some("")];
        let keys = Int8Array::from(vec![Some(1), None, Some(0), Some(2), Some(1)]);
        let values = Arc::new(LargeStringArray::from(vec![Some("x"), Some("y"), None]));
        let columns: [ArrayRef; 4] = [
            Arc::new(StringArray::from(names.clone())),
            Arc::new(LargeStringArray::from(names.clone())),
            Arc::new(StringViewArray::from(names)),
            Arc::new(DictionaryArray::<Int8Type>::new(keys, values)),
        ];
        for column in &columns {
            let plain = |column: &ArrayRef| compute::cast(column, &DataType::Utf8).unwrap();
            let converted = convert(column.as_ref(), &name_type()).unwrap();
            assert_eq!(converted.data_type(), &name_type());
            assert_eq!(&plain(&converted), &plain(column), "{}", column.data_type());
        }
    }

    #[test]
    fn other_types_are_not_converted() {
        let strings = StringArray::from(vec!["1"]);
        assert!(convert(&strings, &DataType::UInt8).is_none());
        assert!(convert(&Int8Array::from(vec![1]), &name_type()).is_none());
        let truth = BooleanArray::from(vec![true]);
        for to in [DataType::UInt8, DataType::UInt64, DataType::Float32] {
            assert!(convert(&truth, &to).is_none(), "{to}");
        }
    }
}
