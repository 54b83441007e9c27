//! A Markdown table. Columns whose first value is a number are aligned to the right.

use std::io::{self, Write};

use super::{Alignment, Cell, RowWriter};

pub struct Markdown<'a> {
    out: &'a mut dyn Write,
    n_columns: usize,
    has_rows: bool,
}

impl<'a> Markdown<'a> {
    pub fn new(out: &'a mut dyn Write) -> Self {
        Markdown {
            out,
            n_columns: 0,
            has_rows: false,
        }
    }

    fn rule(&mut self, right: impl Fn(usize) -> bool) -> io::Result<()> {
        let rules: Vec<&str> = (0..self.n_columns)
            .map(|i| if right(i) { "---:" } else { "---" })
            .collect();
        writeln!(self.out, "|{}|", rules.join("|"))
    }
}

impl RowWriter for Markdown<'_> {
    fn begin(&mut self, columns: &[&str]) -> io::Result<()> {
        self.n_columns = columns.len();
        writeln!(self.out, "| {} |", columns.join(" | "))
    }

    fn row(&mut self, cells: &[Cell]) -> io::Result<()> {
        if !self.has_rows {
            self.has_rows = true;
            self.rule(|column| {
                cells.get(column).and_then(Cell::alignment) == Some(Alignment::Right)
            })?;
        }
        let texts: Vec<String> = cells
            .iter()
            .map(|cell| cell.to_text().replace('|', "\\|"))
            .collect();
        writeln!(self.out, "| {} |", texts.join(" | "))
    }

    fn end(&mut self) -> io::Result<()> {
        if self.has_rows {
            Ok(())
        } else {
            self.rule(|_| false)
        }
    }
}
