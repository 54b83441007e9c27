//! Comma-separated values: lines are read and records are written, quoted as RFC 4180 defines it.
//!
//! A record that is read ends with its line. A quote without an end therefore costs one line and not the rest of the file, a
//! record takes no more memory than its line, and line numbers are those of an editor.

use std::io::{self, Write};

use crate::text::strip_byte_order_mark;

/// Most fields that a line may have.
pub const MAX_FIELDS: usize = 1024;

/// Why a line is not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LineFault {
    /// A quote that is not closed.
    #[error("a quoted field has no end")]
    OpenQuote,
    /// More fields than [`MAX_FIELDS`].
    #[error("more than {MAX_FIELDS} fields")]
    TooManyFields,
    /// A header with two columns of the name that is read.
    #[error("the header names a column twice: it is unknown which of them to read")]
    RepeatedColumn,
}

/// The lines of a text that are not blank, without white space around them and without a byte order mark, with their numbers
/// from 1.
pub fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = strip_byte_order_mark(text).lines().map(str::trim);
    (1..).zip(lines).filter(|(_, line)| !line.is_empty())
}

/// Splits lines into fields, one line at a time in the same memory.
#[derive(Debug)]
pub struct LineReader {
    reader: csv_core::Reader,
    /// The line and its line feed.
    line: Vec<u8>,
    /// The fields, one after the other, and where each ends.
    text: Vec<u8>,
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
    /// Splits one line. A blank line has no fields; white space around fields, and around their quotes, is removed.
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
        // Never full: the fields are shorter than the line with its line feed.
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
            // In an open quote, the line feed belongs to the field.
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

    /// A field by its place from 0, without white space around it.
    pub fn get(&self, place: usize) -> Option<&'a str> {
        let end = *self.ends.get(place)?;
        let start = place.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.text.get(start..end).map(str::trim)
    }

    /// The fields in their order.
    pub fn iter(self) -> impl Iterator<Item = &'a str> {
        (0..self.len()).filter_map(move |place| self.get(place))
    }

    /// The place of a column, where the line is a header; `None` if there is no such column.
    ///
    /// # Errors
    /// [`LineFault::RepeatedColumn`].
    pub fn place_of(&self, column: &str) -> Result<Option<usize>, LineFault> {
        let mut places = self.iter().enumerate().filter(|&(_, name)| name == column);
        let place = places.next().map(|(place, _)| place);
        if places.next().is_some() {
            return Err(LineFault::RepeatedColumn);
        }
        Ok(place)
    }
}

/// Writes records, each ended by a line feed. Fields are quoted where they must be.
#[derive(Debug)]
pub struct RecordWriter<W: Write> {
    csv: csv::Writer<W>,
}

impl<W: Write> RecordWriter<W> {
    /// Writes to `out`, in blocks.
    pub fn new(out: W) -> Self {
        RecordWriter {
            csv: csv::Writer::from_writer(out),
        }
    }

    /// Writes a record. All records of a file have the same number of fields.
    ///
    /// # Errors
    /// `out` cannot be written; a record has another number of fields than the first.
    pub fn record<T: AsRef<[u8]>>(
        &mut self,
        fields: impl IntoIterator<Item = T>,
    ) -> io::Result<()> {
        self.csv.write_record(fields).map_err(io_error)
    }

    /// Writes what is still held. Call it after the last record: an error after that is not reported.
    ///
    /// # Errors
    /// `out` cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        self.csv.flush()
    }
}

/// The error of the output itself: its kind says whether a reader has gone away.
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
    fn quotes_are_those_of_rfc_4180() {
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
    fn rejects_open_quotes_and_lines_of_many_fields() {
        assert_eq!(split("a,\"b"), Err(LineFault::OpenQuote));
        assert_eq!(split("a,\"b\"\""), Err(LineFault::OpenQuote));
        let commas = |n| ",".repeat(n);
        assert_eq!(split(&commas(MAX_FIELDS - 1)).unwrap().len(), MAX_FIELDS);
        for n in [MAX_FIELDS, MAX_FIELDS + 1, 5 * MAX_FIELDS] {
            assert_eq!(split(&commas(n)), Err(LineFault::TooManyFields));
        }
    }

    /// A line after a faulty one is read as if it were the first.
    #[test]
    fn lines_do_not_depend_on_the_ones_before() {
        let mut reader = LineReader::default();
        assert!(reader.fields("a,\"b").is_err());
        assert_eq!(reader.fields("id,x").unwrap().place_of("x"), Ok(Some(1)));
        assert!(reader.fields(&",".repeat(2 * MAX_FIELDS)).is_err());
        assert_eq!(reader.fields("1,2").unwrap().get(0), Some("1"));
    }

    #[test]
    fn a_column_has_one_place() {
        let mut reader = LineReader::default();
        let header = reader.fields("x, id ,\"x\",y").unwrap();
        assert_eq!(header.place_of("id"), Ok(Some(1)));
        assert_eq!(header.place_of("z"), Ok(None));
        assert_eq!(header.place_of("x"), Err(LineFault::RepeatedColumn));
    }

    #[test]
    fn blank_lines_are_counted_and_skipped() {
        let found: Vec<_> = lines("\u{feff}a\r\n \r\n\r\n b\n").collect();
        assert_eq!(found, [(1, "a"), (4, "b")]);
    }

    #[test]
    fn fields_are_quoted_where_they_must_be() {
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
    fn a_closed_pipe_stays_one() {
        let mut writer = RecordWriter::new(Closed);
        let long = "a".repeat(1 << 20);
        let error = writer.record([&long]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
