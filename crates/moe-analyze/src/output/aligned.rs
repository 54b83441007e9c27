//! Aligned columns: numbers to the right, text to the left.

use std::borrow::Cow;
use std::io::{self, Write};

use super::{Alignment, Cell, RowWriter};

pub struct Aligned<'a> {
    out: &'a mut dyn Write,
    columns: Vec<Column>,
}

/// The layout of a column, computed before its first line is written.
struct Column {
    /// Width in characters.
    width: usize,
    /// Right, unless the column contains text.
    alignment: Alignment,
}

impl<'a> Aligned<'a> {
    /// Creates a writer with columns as wide as `rows` need.
    pub fn measured<'c>(
        out: &'a mut dyn Write,
        names: &[&str],
        rows: impl Iterator<Item = Vec<Cell<'c>>>,
    ) -> Self {
        let column = |name: &&str| Column {
            width: name.chars().count(),
            alignment: Alignment::Right,
        };
        let mut columns: Vec<Column> = names.iter().map(column).collect();
        for row in rows {
            for (column, cell) in columns.iter_mut().zip(&row) {
                column.width = column.width.max(cell.to_text().chars().count());
                if cell.alignment() == Some(Alignment::Left) {
                    column.alignment = Alignment::Left;
                }
            }
        }
        Aligned { out, columns }
    }

    fn line<'t>(&mut self, texts: impl Iterator<Item = Cow<'t, str>>) -> io::Result<()> {
        let mut line = String::new();
        for (index, (text, column)) in texts.zip(&self.columns).enumerate() {
            if index > 0 {
                line.push_str("  ");
            }
            let padding = " ".repeat(column.width.saturating_sub(text.chars().count()));
            match column.alignment {
                Alignment::Left => line.extend([&*text, padding.as_str()]),
                Alignment::Right => line.extend([padding.as_str(), &*text]),
            }
        }
        writeln!(self.out, "{}", line.trim_end())
    }
}

impl RowWriter for Aligned<'_> {
    fn begin(&mut self, columns: &[&str]) -> io::Result<()> {
        self.line(columns.iter().map(|&name| name.into()))
    }

    fn row(&mut self, cells: &[Cell]) -> io::Result<()> {
        self.line(cells.iter().map(Cell::to_text))
    }

    fn end(&mut self) -> io::Result<()> {
        Ok(())
    }
}
