//! Output of commands: rows of named columns in the format of `-o`, and text.

mod aligned;
mod csv;
mod json;
mod markdown;
pub mod message;
mod row_output;
mod table;

pub use row_output::RowOutputArgs;
pub use table::Table;

use std::borrow::Cow;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use moe_trace::{ExpertId, LayerId, TokenId};

/// Format of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Aligned columns
    Table,
    /// Comma-separated values with a header line
    Csv,
    /// One JSON array of objects, or one object where this help says so
    Json,
    /// One JSON object per line
    Jsonl,
    /// A Markdown table
    Md,
}

/// One value of a row.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Cell<'a> {
    /// A missing value: empty in text, `null` in JSON.
    #[default]
    Null,
    /// An integer.
    Int(u64),
    /// A number. Tables contain four decimal places, other formats all digits.
    Float(f64),
    /// A number. Tables contain the given number of decimal places, other formats all digits.
    Fixed(f64, usize),
    /// Text.
    Text(Cow<'a, str>),
    /// Any other value: a JSON value in JSON, JSON text in other formats.
    #[cfg_attr(not(feature = "sql"), allow(dead_code))]
    // only results of queries have such values
    Json(serde_json::Value),
}

macro_rules! cell_from {
    ($($int:ty),+) => {$(
        impl From<$int> for Cell<'_> {
            fn from(value: $int) -> Self {
                Cell::Int(value.into())
            }
        }
    )+};
}
cell_from!(u16, u32, u64);

impl From<usize> for Cell<'_> {
    fn from(value: usize) -> Self {
        Cell::Int(value as u64)
    }
}

impl From<LayerId> for Cell<'_> {
    fn from(layer: LayerId) -> Self {
        layer.0.into()
    }
}

impl From<ExpertId> for Cell<'_> {
    fn from(expert: ExpertId) -> Self {
        expert.0.into()
    }
}

impl From<TokenId> for Cell<'_> {
    fn from(token: TokenId) -> Self {
        token.0.into()
    }
}

impl From<f64> for Cell<'_> {
    fn from(value: f64) -> Self {
        Cell::Float(value)
    }
}

impl<'a> From<&'a str> for Cell<'a> {
    fn from(value: &'a str) -> Self {
        Cell::Text(Cow::Borrowed(value))
    }
}

impl From<String> for Cell<'_> {
    fn from(value: String) -> Self {
        Cell::Text(Cow::Owned(value))
    }
}

impl<'a, T: Into<Cell<'a>>> From<Option<T>> for Cell<'a> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Cell::Null, Into::into)
    }
}

/// Returns the cell of a part, such as a layer. `None` means all parts: `all` in tables and Markdown, null in other formats.
pub fn or_all<'a>(part: Option<impl Into<Cell<'a>>>, format: Format) -> Cell<'a> {
    match (part, format) {
        (None, Format::Table | Format::Md) => "all".into(),
        (part, _) => part.into(),
    }
}

/// Returns the cell of a number with `digits` decimal places in tables.
pub fn fixed(value: impl Into<Option<f64>>, digits: usize) -> Cell<'static> {
    let value = value.into();
    value.map_or(Cell::Null, |value| Cell::Fixed(value, digits))
}

/// Rounds a number to `digits` decimal places, as printing does. A negative number never becomes −0.
pub fn round(value: f64, digits: usize) -> f64 {
    // Multiplication would differ for ties.
    without_negative_zero(format!("{value:.digits$}").parse().unwrap_or(value))
}

/// Returns 0 for −0, and all other numbers unchanged. −0 is also the sum of no numbers.
fn without_negative_zero(value: f64) -> f64 {
    if value == 0.0 { 0.0 } else { value }
}

/// Formats a number with `digits` decimal places. A number that is rounded to 0 has no sign.
fn decimal(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$}");
    let is_zero = text.bytes().all(|byte| b"-0.".contains(&byte));
    match text.strip_prefix('-') {
        Some(zero) if is_zero => zero.to_owned(),
        _ => text,
    }
}

/// Returns the cell of a number that is rounded to `digits` decimal places in all formats.
pub fn rounded(value: f64, digits: usize) -> Cell<'static> {
    Cell::Fixed(round(value, digits), digits)
}

/// Alignment of a column in tables and Markdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Alignment {
    Left,
    Right,
}

impl Cell<'_> {
    /// Returns the alignment of the value in its column, or `None` for a missing value.
    fn alignment(&self) -> Option<Alignment> {
        match self {
            Cell::Null => None,
            Cell::Int(_) | Cell::Float(_) | Cell::Fixed(..) => Some(Alignment::Right),
            Cell::Json(value) if value.is_number() => Some(Alignment::Right),
            Cell::Json(_) | Cell::Text(_) => Some(Alignment::Left),
        }
    }

    /// Returns the value in tables and Markdown, on one line.
    pub fn to_text(&self) -> Cow<'_, str> {
        match self {
            Cell::Null => "".into(),
            Cell::Int(value) => value.to_string().into(),
            Cell::Float(value) => decimal(*value, 4).into(),
            Cell::Fixed(value, digits) => decimal(*value, *digits).into(),
            Cell::Text(text) => message::cell(text),
            Cell::Json(value) => message::cell(&value.to_string()).into_owned().into(),
        }
    }
}

/// A writer of rows. The calls are `begin`, then `row` for each row, then `end`.
trait RowWriter {
    fn begin(&mut self, columns: &[&str]) -> io::Result<()>;
    fn row(&mut self, cells: &[Cell]) -> io::Result<()>;
    fn end(&mut self) -> io::Result<()>;
}

impl Format {
    /// Returns the format of a file from its extension.
    ///
    /// # Errors
    /// The extension selects no format.
    pub fn of_path(path: &Path) -> anyhow::Result<Format> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        Ok(match extension {
            Some("csv") => Format::Csv,
            Some("json") => Format::Json,
            Some("jsonl") => Format::Jsonl,
            Some("md") => Format::Md,
            _ => bail!(
                "{}: the extension must be .csv, .json, .jsonl or .md",
                path.display()
            ),
        })
    }
}

/// Writes rows in a format. Every row has one cell per column. Keeps one row in memory; a table iterates twice.
pub fn write_rows<'a>(
    out: &mut dyn Write,
    format: Format,
    columns: &[&str],
    rows: impl IntoIterator<Item = Vec<Cell<'a>>, IntoIter: Clone>,
) -> io::Result<()> {
    let mut rows = rows.into_iter();
    if format == Format::Table {
        let aligned = aligned::Aligned::measured(out, columns, rows.clone());
        return write_all(aligned, columns, rows);
    }
    write_streamed(out, format, columns, &mut rows)
}

/// Like [`write_rows`], for rows that are computed once. A table keeps all rows in memory, because it needs the width of each column
/// before its first line.
pub fn write_streamed<'a>(
    out: &mut dyn Write,
    format: Format,
    columns: &[&str],
    rows: &mut dyn Iterator<Item = Vec<Cell<'a>>>,
) -> io::Result<()> {
    match format {
        Format::Table => {
            let rows: Vec<Vec<Cell>> = rows.collect();
            write_rows(out, format, columns, rows.iter().cloned())
        }
        Format::Csv => write_all(csv::Csv::new(out), columns, rows),
        Format::Json => write_all(json::Json::array(out), columns, rows),
        Format::Jsonl => write_all(json::Json::lines(out), columns, rows),
        Format::Md => write_all(markdown::Markdown::new(out), columns, rows),
    }
}

fn write_all<'a>(
    mut writer: impl RowWriter,
    columns: &[&str],
    rows: impl Iterator<Item = Vec<Cell<'a>>>,
) -> io::Result<()> {
    writer.begin(columns)?;
    for row in rows {
        writer.row(&row)?;
    }
    writer.end()
}

/// Prints on stdout. Control characters are escaped if `format` is a table, Markdown or absent. Other formats are printed unchanged.
///
/// A closed pipe, for example of `head`, is not an error and does not change the exit code.
pub fn to_stdout(
    format: impl Into<Option<Format>>,
    print: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> anyhow::Result<()> {
    match format.into() {
        None | Some(Format::Table | Format::Md) => print_with(print, message::Visible),
        Some(Format::Csv | Format::Json | Format::Jsonl) => data_to_stdout(print),
    }
}

/// Prints data on stdout unchanged; otherwise like [`to_stdout`].
pub fn data_to_stdout(print: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
    print_with(print, |out| out)
}

fn print_with<W: Write>(
    print: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    wrap: impl FnOnce(io::BufWriter<io::StdoutLock<'static>>) -> W,
) -> anyhow::Result<()> {
    let mut out = wrap(io::BufWriter::new(io::stdout().lock()));
    match print(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed.context("writing to stdout"),
    }
}

/// Formats a number of bytes with a binary unit.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Returns an error with its causes on one line. A cause that the text already contains is omitted.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        if !line.is_empty() && is_json(cause) {
            continue;
        }
        let text = cause
            .to_string()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    line
}

/// Returns whether a cause is an error of serde_json in the text. The error that wraps it describes it. Errors of the reader or
/// writer are not described elsewhere.
fn is_json(cause: &(dyn std::error::Error + 'static)) -> bool {
    let error = cause.downcast_ref::<serde_json::Error>();
    let shared = cause.downcast_ref::<Arc<serde_json::Error>>();
    error
        .or(shared.map(|error| &**error))
        .is_some_and(|error| !error.is_io())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn omits_errors_of_serde_json() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("buffers.jsonl");
        std::fs::write(&path, "x\n").unwrap();
        let error = moe_trace::buffers::read(&path).unwrap_err();
        let expected = error.to_string();
        assert_eq!(one_line(&error.into()), expected);
    }

    #[test]
    fn prints_write_errors_of_serde_json() {
        let full: &mut [u8] = &mut [];
        let error = serde_json::to_writer(full, "a").unwrap_err();
        let error = anyhow::Error::new(error).context("writing b");
        assert_eq!(one_line(&error), "writing b: failed to write whole buffer");
    }

    #[test]
    fn prints_each_cause_once() {
        let cause = io::Error::other("disk\nfull");
        let error = anyhow::Error::new(cause)
            .context("a: disk full")
            .context("writing b");
        assert_eq!(one_line(&error), "writing b: a: disk full");
        assert_eq!(one_line(&error.context("c")), "c: writing b: a: disk full");
    }

    fn print(format: Format) -> String {
        let rows = [
            vec!["plain".into(), 7u64.into(), 0.25.into()],
            vec!["a,\"b\"|c\n".into(), Cell::Null, f64::NAN.into()],
        ];
        let mut out = Vec::new();
        write_rows(&mut out, format, &["name", "count", "share"], rows).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn zero_has_no_sign() {
        let cells = || {
            vec![
                Cell::Float(-0.0),
                Cell::Fixed(-0.0, 1),
                rounded(-0.04, 1),
                rounded(-0.06, 1),
            ]
        };
        let print = |format| {
            let mut out = Vec::new();
            write_rows(&mut out, format, &["a", "b", "c", "d"], [cells()]).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(print(Format::Csv), "a,b,c,d\n0,0,0,-0.1\n");
        assert_eq!(
            print(Format::Jsonl),
            "{\"a\":0.0,\"b\":0.0,\"c\":0.0,\"d\":-0.1}\n"
        );
        assert_eq!(
            print(Format::Table),
            "     a    b    c     d\n0.0000  0.0  0.0  -0.1\n"
        );
        assert_eq!(Cell::Float(-1e-9).to_text(), "0.0000");
        assert_eq!(Cell::Fixed(-1.0, 0).to_text(), "-1");
    }

    #[test]
    fn csv_quotes_special_characters() {
        assert_eq!(
            print(Format::Csv),
            "name,count,share\nplain,7,0.25\n\"a,\"\"b\"\"|c\n\",,\n"
        );
    }

    #[test]
    fn json_is_an_array_and_lines_are_objects() {
        let array: serde_json::Value = serde_json::from_str(&print(Format::Json)).unwrap();
        assert_eq!(
            array[0],
            serde_json::json!({"name": "plain", "count": 7, "share": 0.25})
        );
        assert_eq!(array[1]["name"], "a,\"b\"|c\n");
        assert!(array[1]["share"].is_null() && array[1]["count"].is_null());
        let lines = print(Format::Jsonl);
        assert_eq!(lines.lines().count(), 2);
        let second: serde_json::Value =
            serde_json::from_str(lines.lines().nth(1).unwrap()).unwrap();
        assert_eq!(second, array[1]);
    }

    #[test]
    fn json_of_no_rows_is_an_empty_array() {
        let mut out = Vec::new();
        write_rows(&mut out, Format::Json, &["name"], []).unwrap();
        assert_eq!(out, b"[]\n");
    }

    #[test]
    fn table_aligns_and_markdown_escapes() {
        assert_eq!(
            print(Format::Table),
            "name      count   share\nplain         7  0.2500\na,\"b\"|c             NaN\n"
        );
        assert_eq!(
            print(Format::Md),
            "| name | count | share |\n|---|---:|---:|\n| plain | 7 | 0.2500 |\n| a,\"b\"\\|c  |  | NaN |\n"
        );
    }

    #[test]
    fn missing_values_do_not_align_a_table_column_to_the_left() {
        let rows = [vec![Cell::Null], vec![7u64.into()]];
        let mut out = Vec::new();
        write_rows(&mut out, Format::Table, &["count"], rows).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "count\n\n    7\n");
    }

    #[test]
    fn formats_bytes_with_binary_units() {
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes(1 << 20), "1.0 MiB");
        assert_eq!(human_bytes(u64::MAX), "16384.0 PiB");
    }
}
