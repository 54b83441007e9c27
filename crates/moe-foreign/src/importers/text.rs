//! Numbers and columns of text formats.

use std::str::FromStr;

use moe_files::csv::{LineFault, LineReader};
use moe_gguf::text::counted;

use crate::Output;

/// Characters of a value that a message shows.
const SHOWN: usize = 32;

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
pub(super) enum TextFault {
    #[error("{name} {shown:?} is not a number in the range of this field; the line is damaged")]
    Number { name: &'static str, shown: String },
    #[error("no {0}; the line is damaged")]
    Missing(&'static str),
    #[error("{}, but the header names {columns}; the line is damaged", counted(*values, "value"))]
    Values { values: usize, columns: usize },
    #[error("more than {}; the line is damaged", counted(*.0, "value"))]
    TooMany(usize),
    #[error("the header has no column {0}; the file is of another format")]
    NoColumn(&'static str),
    #[error("the header names column {0} twice; the file is damaged")]
    RepeatedColumn(&'static str),
    #[error("{0}; the line is damaged")]
    Csv(#[from] LineFault),
    #[error("{0}; the line is damaged")]
    Line(&'static str),
}

/// Reads `text` as the number `name`.
pub(super) fn number<T: FromStr>(name: &'static str, text: &str) -> Result<T, TextFault> {
    let text = text.trim();
    text.parse().map_err(|_| TextFault::Number {
        name,
        shown: text.chars().take(SHOWN).collect(),
    })
}

/// Reads a field of a column that the table must have.
pub(super) fn required_number<T: FromStr>(
    name: &'static str,
    field: Option<&str>,
) -> Result<T, TextFault> {
    number(name, field.ok_or(TextFault::Missing(name))?)
}

/// Reads a field of a column that the table may lack; an empty field is unknown.
pub(super) fn optional_number<T: FromStr>(
    name: &'static str,
    field: Option<&str>,
) -> Result<Option<T>, TextFault> {
    let field = field.filter(|field| !field.is_empty());
    field.map(|field| number(name, field)).transpose()
}

/// Whether every one of `words` is an integer; false if there are none.
pub(super) fn are_integers<'a>(words: impl IntoIterator<Item = &'a str>) -> bool {
    let mut any = false;
    words.into_iter().all(|word| {
        any = true;
        word.trim().parse::<i64>().is_ok()
    }) && any
}

/// Whether a line is a header that names all these columns.
pub(super) fn has_columns(line: &str, names: &[&str]) -> bool {
    let mut reader = LineReader::default();
    reader.fields(line).is_ok_and(|header| {
        let is_named = |name: &&str| header.iter().any(|column| column == *name);
        names.iter().all(is_named)
    })
}

/// Places of the known columns of a table with a header. Formats gain columns, so columns are found by their names, and
/// unknown ones are ignored.
pub(super) struct Columns<const N: usize> {
    names: [&'static str; N],
    places: [Option<usize>; N],
    n_columns: usize,
    reader: LineReader,
}

impl<const N: usize> Columns<N> {
    /// Finds `names` in a header, which must have the first `n_required` of them; notes the columns that are not among them.
    pub(super) fn of(
        header: &str,
        names: [&'static str; N],
        n_required: usize,
        output: &mut Output<'_>,
    ) -> Result<Self, TextFault> {
        let mut reader = LineReader::default();
        let header = reader.fields(header)?;
        let n_columns = header.len();
        let mut places = [None; N];
        let mut unknown = Vec::new();
        for (place, column) in header.iter().enumerate() {
            match names.iter().position(|&name| name == column) {
                None => unknown.push(column.chars().take(SHOWN).collect::<String>()),
                Some(known) if places[known].is_some() => {
                    return Err(TextFault::RepeatedColumn(names[known]));
                }
                Some(known) => places[known] = Some(place),
            }
        }
        if let Some(lacking) = places[..n_required].iter().position(Option::is_none) {
            return Err(TextFault::NoColumn(names[lacking]));
        }
        if !unknown.is_empty() {
            output.note(format!(
                "ignored unknown {}: {}",
                if unknown.len() == 1 {
                    "column"
                } else {
                    "columns"
                },
                unknown.join(", ")
            ));
        }
        Ok(Self {
            names,
            places,
            n_columns,
            reader,
        })
    }

    /// Whether the header names the column.
    pub(super) fn has(&self, name: &str) -> bool {
        let mut columns = self.names.iter().zip(&self.places);
        columns.any(|(&column, place)| column == name && place.is_some())
    }

    /// The fields of a line in the order of the names; `None` for columns that the header does not have.
    pub(super) fn fields(&mut self, line: &str) -> Result<[Option<&str>; N], TextFault> {
        let fields = self.reader.fields(line)?;
        let n = fields.len();
        // A line that was cut as it was written lacks values.
        if n < self.n_columns
            && let Some(lacking) = self.places.iter().position(|&place| place >= Some(n))
        {
            return Err(TextFault::Missing(self.names[lacking]));
        }
        if n != self.n_columns {
            return Err(TextFault::Values {
                values: n,
                columns: self.n_columns,
            });
        }
        Ok(self.places.map(|place| fields.get(place?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_recognized_in_any_order_and_with_more_columns() {
        assert!(has_columns(
            "expert, layer,\"step\",extra",
            &["step", "layer", "expert"]
        ));
        assert!(!has_columns("expert,layers", &["layer", "expert"]));
    }
}
