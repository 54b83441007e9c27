//! Comma-separated values as in RFC 4180, with LF line ends.

use std::borrow::Cow;
use std::io::{self, Write};

use moe_files::csv::RecordWriter;

use super::{Cell, RowWriter, without_negative_zero};

pub struct Csv<'a> {
    records: RecordWriter<&'a mut dyn Write>,
}

impl<'a> Csv<'a> {
    pub fn new(out: &'a mut dyn Write) -> Self {
        let records = RecordWriter::new(out);
        Csv { records }
    }
}

/// Returns the field of a cell, which is empty for missing values and numbers that are not finite.
fn field<'c>(cell: &'c Cell<'_>) -> Cow<'c, [u8]> {
    match cell {
        Cell::Int(value) => value.to_string().into_bytes().into(),
        Cell::Float(value) | Cell::Fixed(value, _) if value.is_finite() => {
            let value = without_negative_zero(*value);
            value.to_string().into_bytes().into()
        }
        Cell::Null | Cell::Float(_) | Cell::Fixed(..) => Cow::default(),
        Cell::Text(text) => text.as_bytes().into(),
        Cell::Json(value) => value.to_string().into_bytes().into(),
    }
}

impl RowWriter for Csv<'_> {
    fn begin(&mut self, columns: &[&str]) -> io::Result<()> {
        self.records.record(columns)
    }

    fn row(&mut self, cells: &[Cell]) -> io::Result<()> {
        self.records.record(cells.iter().map(field))
    }

    fn end(&mut self) -> io::Result<()> {
        self.records.flush()
    }
}
