//! Numbers and columns of text formats.
//!
//! [`Columns`] finds the columns of a CSV table by name, because formats gain columns.

use std::str::FromStr;

use moe_files::csv::{LineFault, LineReader};
use moe_files::text::counted;

use crate::Output;

/// Maximum number of characters of a value in an error.
const MAX_SHOWN: usize = 32;

/// Why a line of a text format is invalid.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineError {
    /// A field is not a number, or out of range.
    #[error("{name} {shown:?} is {problem}; the line is damaged")]
    Number {
        /// Name of the field.
        name: &'static str,
        /// Start of its text.
        shown: String,
        /// What it is instead of such a number.
        problem: &'static str,
    },
    /// A field is missing.
    #[error("{0} is missing; the line is damaged")]
    Missing(&'static str),
    /// The line has more or fewer fields than the header.
    #[error("the line has {}, but the header has {columns} columns; the line is damaged", counted(*values, "value"))]
    Values {
        /// Fields of the line.
        values: usize,
        /// Columns of the header.
        columns: usize,
    },
    /// The line has more fields than the format.
    #[error("the line has more than {}; the line is damaged", counted(*.0, "value"))]
    TooMany(usize),
    /// The header lacks a required column.
    #[error("the header has no column {0}; the file has another format")]
    NoColumn(&'static str),
    /// The header contains a column twice.
    #[error("the header contains column {0} twice; the file is damaged")]
    RepeatedColumn(&'static str),
    /// The line is not valid CSV.
    #[error("{0}; the line is damaged")]
    Csv(#[from] LineFault),
    /// A token has more or fewer weights than experts.
    #[error("{} for {}; the line is damaged", counted(*weights, "weight"), counted(*experts, "expert"))]
    Weights {
        /// Number of weights.
        weights: usize,
        /// Number of experts.
        experts: usize,
    },
    /// The line violates another rule of the format.
    #[error("{0}; the line is damaged")]
    Format(&'static str),
}

/// The start of a text, for an error or a note.
pub(in crate::importers) fn shown(text: &str) -> String {
    text.chars().take(MAX_SHOWN).collect()
}

/// Parses `text` as the number `name`.
pub(in crate::importers) fn number<T: FromStr>(
    name: &'static str,
    text: &str,
) -> Result<T, LineError> {
    let text = text.trim();
    text.parse().map_err(|_| LineError::Number {
        name,
        shown: shown(text),
        problem: match text.parse::<f64>() {
            Ok(_) => "out of the range of this field",
            Err(_) => "not a number",
        },
    })
}

/// Parses a field of a required column.
pub(in crate::importers) fn required_number<T: FromStr>(
    name: &'static str,
    field: Option<&str>,
) -> Result<T, LineError> {
    number(name, field.ok_or(LineError::Missing(name))?)
}

/// Parses a field of an optional column; `None` if the column is missing or the field is empty.
pub(in crate::importers) fn optional_number<T: FromStr>(
    name: &'static str,
    field: Option<&str>,
) -> Result<Option<T>, LineError> {
    let field = field.filter(|field| !field.is_empty());
    field.map(|field| number(name, field)).transpose()
}

/// Whether all `words` are integers; false without words.
pub(in crate::importers) fn are_integers<'a>(words: impl IntoIterator<Item = &'a str>) -> bool {
    let mut any = false;
    words.into_iter().all(|word| {
        any = true;
        word.trim().parse::<i64>().is_ok()
    }) && any
}

/// Whether a line is a CSV header that contains all `names`.
pub(in crate::importers) fn has_columns(line: &str, names: &[&str]) -> bool {
    let mut reader = LineReader::default();
    reader.fields(line).is_ok_and(|header| {
        let is_named = |name: &&str| header.iter().any(|column| column == *name);
        names.iter().all(is_named)
    })
}

/// Indices of the known columns of a CSV table. Unknown columns are ignored.
pub(in crate::importers) struct Columns<const N: usize> {
    names: [&'static str; N],
    places: [Option<usize>; N],
    n_columns: usize,
    reader: LineReader,
}

impl<const N: usize> Columns<N> {
    /// Finds the columns `names`, of which the first `n_required` are required, in a header; notes unknown columns.
    pub(in crate::importers) fn of(
        header: &str,
        names: [&'static str; N],
        n_required: usize,
        output: &mut Output<'_>,
    ) -> Result<Self, LineError> {
        let mut reader = LineReader::default();
        let header = reader.fields(header)?;
        let n_columns = header.len();
        let mut places = [None; N];
        let mut unknown = Vec::new();
        for (place, column) in header.iter().enumerate() {
            match names.iter().position(|&name| name == column) {
                None => unknown.push(shown(column)),
                Some(known) if places[known].is_some() => {
                    return Err(LineError::RepeatedColumn(names[known]));
                }
                Some(known) => places[known] = Some(place),
            }
        }
        if let Some(lacking) = places[..n_required].iter().position(Option::is_none) {
            return Err(LineError::NoColumn(names[lacking]));
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

    /// Whether the header contains the column.
    pub(in crate::importers) fn has(&self, name: &str) -> bool {
        let mut columns = self.names.iter().zip(&self.places);
        columns.any(|(&column, place)| column == name && place.is_some())
    }

    /// The fields of a line in the order of `names`; `None` for columns that the header lacks.
    pub(in crate::importers) fn fields(
        &mut self,
        line: &str,
    ) -> Result<[Option<&str>; N], LineError> {
        let fields = self.reader.fields(line)?;
        let n = fields.len();
        // Name the first missing field: a truncated last line has too few.
        if n < self.n_columns
            && let Some(lacking) = self.places.iter().position(|&place| place >= Some(n))
        {
            return Err(LineError::Missing(self.names[lacking]));
        }
        if n != self.n_columns {
            return Err(LineError::Values {
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
    fn recognizes_headers_in_any_order_and_with_further_columns() {
        assert!(has_columns(
            "expert, layer,\"step\",extra",
            &["step", "layer", "expert"]
        ));
        assert!(!has_columns("expert,layers", &["layer", "expert"]));
    }
}
