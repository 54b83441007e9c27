//! Tables with columns that are declared once: name, header with the unit, value.

use std::io::{self, Write};

use super::{Cell, Format, write_rows};

/// Rows and their columns.
///
/// ```ignore
/// Table::of(&layers)
///     .column("layer_id", "layer", |layer| layer.number)
///     .column("stall_us", "stall (µs)", |layer| layer.stall_ns.map(|ns| ns / 1e3))
///     .write(out, format)
/// ```
pub struct Table<'a, I: Iterator> {
    rows: I,
    columns: Vec<Column<'a, I::Item>>,
}

struct Column<'a, R> {
    /// Name in CSV and JSON.
    name: &'a str,
    /// Header in tables and Markdown, with the unit.
    header: &'a str,
    value: Box<dyn Fn(&R) -> Cell<'a> + 'a>,
}

impl<'a, I: Iterator + Clone> Table<'a, I> {
    /// Creates a table without columns. Rows are computed while they are written, twice for aligned columns.
    pub fn of(rows: impl IntoIterator<IntoIter = I, Item = I::Item>) -> Self {
        Table {
            rows: rows.into_iter(),
            columns: Vec::new(),
        }
    }

    /// Adds a column: its name in CSV and JSON, its header in tables and Markdown, and the value of a row.
    pub fn column<C: Into<Cell<'a>>>(
        mut self,
        name: &'a str,
        header: &'a str,
        value: impl Fn(&I::Item) -> C + 'a,
    ) -> Self {
        self.columns.push(Column {
            name,
            header,
            value: Box::new(move |row| value(row).into()),
        });
        self
    }

    /// Adds a column to a table without a machine-readable format. The header is also the name.
    pub fn shown<C: Into<Cell<'a>>>(
        self,
        header: &'a str,
        value: impl Fn(&I::Item) -> C + 'a,
    ) -> Self {
        self.column(header, header, value)
    }

    /// Writes all rows in a format.
    pub fn write(self, out: &mut dyn Write, format: Format) -> io::Result<()> {
        let columns = &self.columns;
        let names = columns.iter().map(|column| match format {
            Format::Table | Format::Md => column.header,
            Format::Csv | Format::Json | Format::Jsonl => column.name,
        });
        let names: Vec<&str> = names.collect();
        let cells = |row| columns.iter().map(|column| (column.value)(&row)).collect();
        write_rows(out, format, &names, self.rows.map(cells))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Layer {
        number: u16,
        stall_us: Option<f64>,
    }

    fn print(format: Format) -> String {
        let layers = [(0, Some(1.25)), (1, None)];
        let layers = layers.map(|(number, stall_us)| Layer { number, stall_us });
        let mut out = Vec::new();
        Table::of(&layers)
            .column("layer_id", "layer", |layer| layer.number)
            .column("stall_us", "stall (µs)", |layer| layer.stall_us)
            .write(&mut out, format)
            .unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn csv_and_json_use_names_and_tables_use_headers() {
        assert_eq!(print(Format::Csv), "layer_id,stall_us\n0,1.25\n1,\n");
        assert_eq!(
            print(Format::Jsonl),
            "{\"layer_id\":0,\"stall_us\":1.25}\n{\"layer_id\":1,\"stall_us\":null}\n"
        );
        assert_eq!(
            print(Format::Table),
            "layer  stall (µs)\n    0      1.2500\n    1\n"
        );
        assert_eq!(
            print(Format::Md),
            "| layer | stall (µs) |\n|---:|---:|\n| 0 | 1.2500 |\n| 1 |  |\n"
        );
    }
}
