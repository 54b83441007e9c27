//! Rows of a result.

use std::sync::Arc;
use std::vec;

use polars::prelude::*;

use super::Error;
use super::catch::catch;
use super::scan::Session;
use super::steps::Frames;

/// A value in a result.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Null, or a value that is missing.
    Null,
    /// A Boolean.
    Bool(bool),
    /// A signed integer.
    Int(i64),
    /// An unsigned integer.
    UInt(u64),
    /// A floating-point number.
    Float(f64),
    /// Text. Dates and times are text in ISO 8601 format.
    Text(String),
    /// A list, for example from ARRAY_AGG.
    List(Vec<Value>),
    /// A struct: values with names.
    Struct(Vec<(String, Value)>),
}

/// Result rows with one value per column. If the query runs in steps, rows are computed on demand.
pub struct Rows {
    columns: Vec<String>,
    frames: Frames,
    rows: vec::IntoIter<Vec<Value>>,
    session: Arc<Session>,
}

/// Number of rows that are converted at a time.
const BATCH_ROWS: usize = 8 * 1024;

impl Rows {
    pub(super) fn new(columns: Vec<String>, frames: Frames, session: Arc<Session>) -> Self {
        Self {
            columns,
            frames: Box::new(frames.flat_map(batches)),
            rows: Vec::new().into_iter(),
            session,
        }
    }

    /// Names of the columns.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }
}

/// Splits a frame into frames of [`BATCH_ROWS`] rows.
fn batches(frame: PolarsResult<DataFrame>) -> Frames {
    match frame {
        Ok(frame) => {
            let starts = (0..frame.height()).step_by(BATCH_ROWS);
            Box::new(starts.map(move |start| Ok(frame.slice(start as i64, BATCH_ROWS))))
        }
        Err(error) => Box::new(std::iter::once(Err(error))),
    }
}

impl Iterator for Rows {
    type Item = Result<Vec<Value>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(row) = self.rows.next() {
                return Some(Ok(row));
            }
            let rows = catch(|| match self.frames.next() {
                Some(frame) => frame.and_then(|frame| values(&frame)).map(Some),
                None => Ok(None),
            });
            match rows {
                Ok(Some(rows)) => self.rows = rows.into_iter(),
                Ok(None) => return None,
                Err(error) => {
                    self.frames = Box::new(std::iter::empty());
                    return Some(Err(self.session.explain(error)));
                }
            }
        }
    }
}

fn values(frame: &DataFrame) -> PolarsResult<Vec<Vec<Value>>> {
    let n_columns = frame.columns().len();
    let mut rows = vec![Vec::with_capacity(n_columns); frame.height()];
    for column in frame.columns() {
        let column = column.as_materialized_series();
        for (i, row) in rows.iter_mut().enumerate() {
            row.push(value(&column.get(i)?)?);
        }
    }
    Ok(rows)
}

fn value(of: &AnyValue<'_>) -> PolarsResult<Value> {
    Ok(match of {
        AnyValue::Null => Value::Null,
        &AnyValue::Boolean(value) => Value::Bool(value),
        AnyValue::String(text) => Value::Text((*text).to_owned()),
        AnyValue::StringOwned(text) => Value::Text(text.to_string()),
        &AnyValue::UInt32(value) => Value::Int(value.into()),
        &AnyValue::UInt64(value) => Value::UInt(value),
        &AnyValue::Int32(value) => Value::Int(value.into()),
        &AnyValue::Int64(value) => Value::Int(value),
        &AnyValue::Float64(value) => Value::Float(value),
        // The shortest digits that identify the 32-bit number.
        AnyValue::Float32(value) => Value::Float(value.to_string().parse().unwrap_or(f64::NAN)),
        AnyValue::List(values) => list(values)?,
        AnyValue::Array(values, _) => list(values)?,
        AnyValue::Struct(_, _, fields) => {
            let values = of._iter_struct_av();
            let fields = fields.iter().zip(values);
            let fields = fields.map(|(field, of)| Ok((field.name().to_string(), value(&of)?)));
            Value::Struct(fields.collect::<PolarsResult<_>>()?)
        }
        AnyValue::Decimal(..) => Value::Float(of.extract().unwrap_or(f64::NAN)),
        other => Value::Text(other.to_string()),
    })
}

fn list(values: &Series) -> PolarsResult<Value> {
    let values = (0..values.len()).map(|i| value(&values.get(i)?));
    Ok(Value::List(values.collect::<PolarsResult<_>>()?))
}
