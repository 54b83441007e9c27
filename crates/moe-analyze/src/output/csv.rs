//! Comma-separated values as in RFC 4180, with line feeds alone.

use std::io::{self, Write};

use super::{Cell, RowWriter};

pub struct Csv<'a> {
    out: &'a mut dyn Write,
}

impl<'a> Csv<'a> {
    pub fn new(out: &'a mut dyn Write) -> Self {
        Csv { out }
    }

    fn text(&mut self, text: &str) -> io::Result<()> {
        if text.contains([',', '"', '\n', '\r']) {
            write!(self.out, "\"{}\"", text.replace('"', "\"\""))
        } else {
            self.out.write_all(text.as_bytes())
        }
    }
}

impl RowWriter for Csv<'_> {
    fn begin(&mut self, columns: &[&str]) -> io::Result<()> {
        writeln!(self.out, "{}", columns.join(","))
    }

    fn row(&mut self, cells: &[Cell]) -> io::Result<()> {
        for (index, cell) in cells.iter().enumerate() {
            if index > 0 {
                self.out.write_all(b",")?;
            }
            match cell {
                Cell::Null => {}
                Cell::Int(value) => write!(self.out, "{value}")?,
                Cell::Float(value) if value.is_finite() => write!(self.out, "{value}")?,
                Cell::Float(_) => {}
                Cell::Text(text) => self.text(text)?,
            }
        }
        self.out.write_all(b"\n")
    }

    fn end(&mut self) -> io::Result<()> {
        Ok(())
    }
}
