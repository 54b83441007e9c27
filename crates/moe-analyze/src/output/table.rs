//! Aligned columns: numbers to the right, text to the left. Holds all rows, since the widths come last.

use std::io::{self, Write};

use super::{Cell, RowWriter};

pub struct Table<'a> {
    out: &'a mut dyn Write,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
    /// Columns that hold some text; the others are aligned to the right.
    has_text: Vec<bool>,
}

impl<'a> Table<'a> {
    pub fn new(out: &'a mut dyn Write) -> Self {
        Table {
            out,
            header: Vec::new(),
            rows: Vec::new(),
            has_text: Vec::new(),
        }
    }

    fn line(&mut self, texts: &[String], widths: &[usize]) -> io::Result<()> {
        let mut line = String::new();
        let columns = texts.iter().zip(widths).zip(&self.has_text);
        for (index, ((text, &width), &has_text)) in columns.enumerate() {
            if index > 0 {
                line.push_str("  ");
            }
            let padding = " ".repeat(width.saturating_sub(text.chars().count()));
            if has_text {
                line.push_str(text);
                line.push_str(&padding);
            } else {
                line.push_str(&padding);
                line.push_str(text);
            }
        }
        writeln!(self.out, "{}", line.trim_end())
    }
}

impl RowWriter for Table<'_> {
    fn begin(&mut self, columns: &[&str]) -> io::Result<()> {
        self.header = columns.iter().map(ToString::to_string).collect();
        self.has_text = vec![false; columns.len()];
        Ok(())
    }

    fn row(&mut self, cells: &[Cell]) -> io::Result<()> {
        for (has_text, cell) in self.has_text.iter_mut().zip(cells) {
            *has_text |= matches!(cell, Cell::Text(_));
        }
        self.rows.push(
            cells
                .iter()
                .map(|cell| cell.for_reading().into_owned())
                .collect(),
        );
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        let header = std::mem::take(&mut self.header);
        let rows = std::mem::take(&mut self.rows);
        let mut widths: Vec<usize> = header.iter().map(|name| name.chars().count()).collect();
        for row in &rows {
            for (width, text) in widths.iter_mut().zip(row) {
                *width = (*width).max(text.chars().count());
            }
        }
        self.line(&header, &widths)?;
        for row in &rows {
            self.line(row, &widths)?;
        }
        Ok(())
    }
}
