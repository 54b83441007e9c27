//! Reading and writing of comma-separated values with the quoting of RFC 4180.
//!
//! A record ends at the end of its line; quoted line feeds are not read. An unclosed quote therefore makes one line invalid,
//! not the rest of the file. A record needs no more memory than its line, and line numbers are those of an editor.

use std::io::{self, Write};

use crate::text::strip_byte_order_mark;

/// Maximum number of fields of a line.
pub const MAX_FIELDS: usize = 1024;

/// Why a line is not a valid record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LineFault {
    /// A quoted field has no closing quote.
    #[error("a quoted field has no closing quote")]
    OpenQuote,
    /// The line has more than [`MAX_FIELDS`] fields.
    #[error("more than {MAX_FIELDS} fields")]
    TooManyFields,
    /// Two columns of the header have the requested name.
    #[error("two columns of the header have the same name, so the column to read is ambiguous")]
    RepeatedColumn,
}

/// Returns the non-blank lines of a text with their numbers, which start at 1. A byte order mark, and white space around
/// lines, is removed.
pub fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = strip_byte_order_mark(text).lines().map(str::trim);
    (1..).zip(lines).filter(|(_, line)| !line.is_empty())
}

/// Splits lines into fields, one line at a time. The buffers are reused.
#[derive(Debug)]
pub struct LineReader {
    reader: csv_core::Reader,
    /// The line with a line feed.
    line: Vec<u8>,
    /// The unquoted fields without separators.
    text: Vec<u8>,
    /// For each field, the offset of its end in `text`.
    ends: Vec<usize>,
}

impl Default for LineReader {
    fn default() -> Self {
        let line_feed = csv_core::Terminator::Any(b'\n');
        let mut builder = csv_core::ReaderBuilder::new();
        LineReader {
            reader: builder.terminator(line_feed).build(),
            line: Vec::new(),
            text: Vec::new(),
            ends: Vec::new(),
        }
    }
}

impl LineReader {
    /// Splits one line. A blank line has no fields. White space around fields, and around their quotes, is removed.
    ///
    /// # Errors
    /// [`LineFault`].
    pub fn fields(&mut self, line: &str) -> Result<Fields<'_>, LineFault> {
        self.reader.reset();
        self.ends.clear();
        self.line.clear();
        self.line.extend_from_slice(line.trim().as_bytes());
        if self.line.is_empty() {
            return Ok(Fields::default());
        }
        self.line.push(b'\n');
        // Large enough: the fields together are shorter than the line with its line feed.
        self.text.resize(self.line.len(), 0);
        let (mut rest, mut end) = (&*self.line, 0);
        loop {
            let n_blank = rest
                .iter()
                .take_while(|&&byte| byte == b' ' || byte == b'\t');
            rest = &rest[n_blank.count()..];
            let (result, n_read, n_text) = self.reader.read_field(rest, &mut self.text[end..]);
            rest = &rest[n_read..];
            end += n_text;
            // After an unclosed quote, the line feed is part of the field, so the field does not end.
            let csv_core::ReadFieldResult::Field { record_end } = result else {
                return Err(LineFault::OpenQuote);
            };
            if self.ends.len() == MAX_FIELDS {
                return Err(LineFault::TooManyFields);
            }
            self.ends.push(end);
            if record_end {
                return Ok(Fields {
                    text: str::from_utf8(&self.text[..end]).unwrap_or_default(),
                    ends: &self.ends,
                });
            }
        }
    }
}

/// The fields of a line.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fields<'a> {
    text: &'a str,
    ends: &'a [usize],
}

impl<'a> Fields<'a> {
    /// Number of fields.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether the line is blank.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the field at `index`, which starts at 0, without white space around it.
    pub fn get(&self, index: usize) -> Option<&'a str> {
        let end = *self.ends.get(index)?;
        let start = index
            .checked_sub(1)
            .map_or(0, |previous| self.ends[previous]);
        self.text.get(start..end).map(str::trim)
    }

    /// Iterates over the fields in their order.
    pub fn iter(self) -> impl Iterator<Item = &'a str> {
        (0..self.len()).filter_map(move |index| self.get(index))
    }

    /// Returns the index of a column of a header, or `None` if there is no such column.
    ///
    /// # Errors
    /// [`LineFault::RepeatedColumn`].
    pub fn column_index(&self, column: &str) -> Result<Option<usize>, LineFault> {
        let mut found = self.iter().enumerate().filter(|&(_, name)| name == column);
        let index = found.next().map(|(index, _)| index);
        if found.next().is_some() {
            return Err(LineFault::RepeatedColumn);
        }
        Ok(index)
    }
}

/// Writes records that end with a line feed. Fields are quoted only if necessary.
#[derive(Debug)]
pub struct RecordWriter<W: Write> {
    csv: csv::Writer<W>,
}

impl<W: Write> RecordWriter<W> {
    /// Returns a buffered writer to `out`.
    pub fn new(out: W) -> Self {
        RecordWriter {
            csv: csv::Writer::from_writer(out),
        }
    }

    /// Writes a record. All records of a file have the same number of fields.
    ///
    /// # Errors
    /// `out` cannot be written; the number of fields differs from that of the first record.
    pub fn record<T: AsRef<[u8]>>(
        &mut self,
        fields: impl IntoIterator<Item = T>,
    ) -> io::Result<()> {
        self.csv.write_record(fields).map_err(io_error)
    }

    /// Writes buffered records to `out`. Call it after the last record: dropping the writer ignores errors.
    ///
    /// # Errors
    /// `out` cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        self.csv.flush()
    }
}

/// Returns the I/O error of the output itself, so that callers can recognize a closed pipe by its kind.
fn io_error(error: csv::Error) -> io::Error {
    if !error.is_io_error() {
        return io::Error::other(error);
    }
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error,
        other => io::Error::other(format!("{other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(line: &str) -> Result<Vec<String>, LineFault> {
        let mut reader = LineReader::default();
        let fields = reader.fields(line)?;
        assert_eq!(fields.len(), fields.iter().count());
        Ok(fields.iter().map(str::to_owned).collect())
    }

    #[test]
    fn splits_fields_quoted_as_in_rfc_4180() {
        for (line, expected) in [
            ("a,b", vec!["a", "b"]),
            (" a , b\r", vec!["a", "b"]),
            (",", vec!["", ""]),
            ("\"a,b\",c", vec!["a,b", "c"]),
            ("\"a \"\"b\"\"\",", vec!["a \"b\"", ""]),
            ("a\"b\",c", vec!["a\"b\"", "c"]),
            ("ä,\"ö\r\"", vec!["ä", "ö"]),
            ("a, \"b, c\" ,\t\"\"", vec!["a", "b, c", ""]),
            ("  ", vec![]),
        ] {
            assert_eq!(split(line).unwrap(), expected, "{line:?}");
        }
    }

    #[test]
    fn rejects_unclosed_quotes_and_too_many_fields() {
        assert_eq!(split("a,\"b"), Err(LineFault::OpenQuote));
        assert_eq!(split("a,\"b\"\""), Err(LineFault::OpenQuote));
        let commas = |n| ",".repeat(n);
        assert_eq!(split(&commas(MAX_FIELDS - 1)).unwrap().len(), MAX_FIELDS);
        for n in [MAX_FIELDS, MAX_FIELDS + 1, 5 * MAX_FIELDS] {
            assert_eq!(split(&commas(n)), Err(LineFault::TooManyFields));
        }
    }

    #[test]
    fn reads_valid_lines_after_an_invalid_line() {
        let mut reader = LineReader::default();
        assert!(reader.fields("a,\"b").is_err());
        assert_eq!(
            reader.fields("id,x").unwrap().column_index("x"),
            Ok(Some(1))
        );
        assert!(reader.fields(&",".repeat(2 * MAX_FIELDS)).is_err());
        assert_eq!(reader.fields("1,2").unwrap().get(0), Some("1"));
    }

    #[test]
    fn rejects_repeated_columns_only_when_they_are_requested() {
        let mut reader = LineReader::default();
        let header = reader.fields("x, id ,\"x\",y").unwrap();
        assert_eq!(header.column_index("id"), Ok(Some(1)));
        assert_eq!(header.column_index("z"), Ok(None));
        assert_eq!(header.column_index("x"), Err(LineFault::RepeatedColumn));
    }

    #[test]
    fn counts_and_skips_blank_lines() {
        let found: Vec<_> = lines("\u{feff}a\r\n \r\n\r\n b\n").collect();
        assert_eq!(found, [(1, "a"), (4, "b")]);
    }

    #[test]
    fn quotes_only_fields_that_need_it() {
        let mut text = Vec::new();
        let mut writer = RecordWriter::new(&mut text);
        writer.record(["plain", "a,b", "", "\"", "c\nd"]).unwrap();
        drop(writer);
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "plain,\"a,b\",,\"\"\"\",\"c\nd\"\n"
        );
    }

    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn preserves_the_error_kind_of_a_closed_pipe() {
        let mut writer = RecordWriter::new(Closed);
        let long = "a".repeat(1 << 20);
        let error = writer.record([&long]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
