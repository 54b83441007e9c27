//! JSON objects, in one array or one per line.

use std::io::{self, Write};

use super::{Cell, RowWriter, without_negative_zero};

pub struct Json<'a> {
    out: &'a mut dyn Write,
    as_array: bool,
    columns: Vec<String>,
    n_rows: u64,
}

impl<'a> Json<'a> {
    /// Creates a writer of one array with an object per row.
    pub fn array(out: &'a mut dyn Write) -> Self {
        Json {
            out,
            as_array: true,
            columns: Vec::new(),
            n_rows: 0,
        }
    }

    /// Creates a writer of one object per line.
    pub fn lines(out: &'a mut dyn Write) -> Self {
        Json {
            out,
            as_array: false,
            columns: Vec::new(),
            n_rows: 0,
        }
    }
}

impl RowWriter for Json<'_> {
    fn begin(&mut self, columns: &[&str]) -> io::Result<()> {
        self.columns = columns.iter().map(ToString::to_string).collect();
        if self.as_array {
            self.out.write_all(b"[")
        } else {
            Ok(())
        }
    }

    fn row(&mut self, cells: &[Cell]) -> io::Result<()> {
        if self.as_array {
            self.out
                .write_all(if self.n_rows == 0 { b"\n" } else { b",\n" })?;
        }
        self.n_rows += 1;
        self.out.write_all(b"{")?;
        for (index, (column, cell)) in self.columns.iter().zip(cells).enumerate() {
            if index > 0 {
                self.out.write_all(b",")?;
            }
            serde_json::to_writer(&mut *self.out, column)?;
            self.out.write_all(b":")?;
            match cell {
                Cell::Null => self.out.write_all(b"null")?,
                Cell::Int(value) => write!(self.out, "{value}")?,
                // serde_json writes numbers that are not finite as null.
                Cell::Float(value) | Cell::Fixed(value, _) => {
                    serde_json::to_writer(&mut *self.out, &without_negative_zero(*value))?
                }
                Cell::Text(text) => serde_json::to_writer(&mut *self.out, text)?,
                Cell::Json(value) => serde_json::to_writer(&mut *self.out, value)?,
            }
        }
        self.out
            .write_all(if self.as_array { b"}" } else { b"}\n" })
    }

    fn end(&mut self) -> io::Result<()> {
        match (self.as_array, self.n_rows) {
            (false, _) => Ok(()),
            (true, 0) => self.out.write_all(b"]\n"),
            (true, _) => self.out.write_all(b"\n]\n"),
        }
    }
}
