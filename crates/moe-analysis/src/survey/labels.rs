//! Which domain a token is of.

use std::collections::HashMap;

use moe_files::csv::{self, Fields, LineReader};

use super::Error;

/// Why a file of labels is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LabelFault {
    /// A line that is not CSV.
    #[error("{0}")]
    Line(#[from] csv::LineFault),
    /// More fields than columns.
    #[error(
        "{fields} fields instead of {columns}: put double quotes around a label that contains a comma"
    )]
    TooManyFields {
        /// Fields of the line.
        fields: usize,
        /// Columns of the file.
        columns: usize,
    },
    /// A line without a sequence and a label.
    #[error("no comma")]
    NoComma,
    /// A sequence that is not a number.
    #[error("{found:?} is not the number of a sequence")]
    Sequence {
        /// What stands there instead.
        found: String,
    },
    /// An empty label.
    #[error("the label is missing")]
    NoLabel,
    /// A sequence with two labels.
    #[error("sequence {sequence} was {before:?} before")]
    Repeated {
        /// The sequence.
        sequence: u32,
        /// Its label in an earlier line.
        before: String,
    },
    /// A file without labels.
    #[error("the file has no label")]
    Empty,
}

/// What tokens without a label are called.
const NONE: &str = "(none)";

/// Domains of inputs, or of the sequences of one input.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Labels {
    /// One for each input, in their order.
    inputs: Vec<String>,
    /// Each label, and whether a token was of the sequence.
    sequences: HashMap<u32, (String, bool)>,
}

impl Labels {
    /// A label for each input, in their order.
    pub fn of_inputs(labels: Vec<String>) -> Labels {
        Labels {
            inputs: labels,
            ..Labels::default()
        }
    }

    /// Labels of sequences from CSV lines `sequence,label`. A first line may name the columns, which may then come in any
    /// order; other columns are ignored. A label that contains a comma or a quote is quoted as in RFC 4180. Empty lines
    /// are ignored.
    ///
    /// # Errors
    /// [`Error::Labels`] for a line without both, or a sequence that is named twice with two labels.
    pub fn parse(text: &str) -> Result<Labels, Error> {
        let mut sequences = HashMap::new();
        let mut columns = Columns::default();
        let mut reader = LineReader::default();
        for (n, (line, text)) in csv::lines(text).enumerate() {
            let fail = |fault| Error::Labels { line, fault };
            let fields = reader.fields(text).map_err(|fault| fail(fault.into()))?;
            if n == 0
                && let Some(named) =
                    Columns::of_header(fields).map_err(|fault| fail(fault.into()))?
            {
                columns = named;
                continue;
            }
            let (sequence, label) = columns.label(fields).map_err(fail)?;
            match sequences.insert(sequence, (label.to_owned(), false)) {
                Some((before, _)) if before != label => {
                    return Err(fail(LabelFault::Repeated { sequence, before }));
                }
                _ => {}
            }
        }
        if sequences.is_empty() {
            return Err(Error::Labels {
                line: 1,
                fault: LabelFault::Empty,
            });
        }
        Ok(Labels {
            sequences,
            ..Labels::default()
        })
    }

    /// Whether no label is given.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty() && self.sequences.is_empty()
    }

    /// The label of a sequence of the `n_input`th input, counted from 1.
    pub(super) fn of(&mut self, n_input: usize, sequence: Option<u32>) -> &str {
        let of_input = n_input.checked_sub(1).and_then(|n| self.inputs.get(n));
        let label = of_input.or_else(|| {
            let (label, is_used) = self.sequences.get_mut(&sequence?)?;
            *is_used = true;
            Some(label)
        });
        label.map_or(NONE, String::as_str)
    }

    /// Sequences that have a label and no token, ascending.
    pub(super) fn unused(&self) -> Vec<u32> {
        let unused = self.sequences.iter().filter(|(_, (_, is_used))| !is_used);
        let mut unused: Vec<u32> = unused.map(|(&sequence, _)| sequence).collect();
        unused.sort_unstable();
        unused
    }
}

/// Where the fields of a line are.
struct Columns {
    sequence: usize,
    label: usize,
    n: usize,
}

impl Default for Columns {
    fn default() -> Columns {
        Columns {
            sequence: 0,
            label: 1,
            n: 2,
        }
    }
}

impl Columns {
    /// The columns that a header names; `None` if the line is not a header. Without a column `label`, the labels are in the
    /// column after that of the sequences.
    ///
    /// # Errors
    /// The header names a column twice.
    fn of_header(fields: Fields<'_>) -> Result<Option<Columns>, csv::LineFault> {
        let name = fields.iter().find(|name| name.starts_with("sequence"));
        let place = name.map(|name| fields.place_of(name)).transpose()?;
        let Some(sequence) = place.flatten() else {
            return Ok(None);
        };
        Ok(Some(Columns {
            sequence,
            label: fields.place_of("label")?.unwrap_or(sequence + 1),
            n: fields.len(),
        }))
    }

    /// Sequence and label of a line.
    fn label<'a>(&self, fields: Fields<'a>) -> Result<(u32, &'a str), LabelFault> {
        if fields.len() > self.n {
            return Err(LabelFault::TooManyFields {
                fields: fields.len(),
                columns: self.n,
            });
        }
        let (Some(sequence), Some(label)) = (fields.get(self.sequence), fields.get(self.label))
        else {
            return Err(LabelFault::NoComma);
        };
        let number = sequence.parse().map_err(|_| LabelFault::Sequence {
            found: sequence.to_owned(),
        })?;
        if label.is_empty() {
            return Err(LabelFault::NoLabel);
        }
        Ok((number, label))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_sequences() {
        let mut labels = Labels::parse("sequence,label\n0,code\n\n 7 , law \n9,\"a,b\"\n").unwrap();
        assert_eq!(labels.of(1, Some(0)), "code");
        assert_eq!(labels.unused(), [7, 9]);
        assert_eq!(labels.of(1, Some(7)), "law");
        assert_eq!(labels.of(1, Some(9)), "a,b");
        assert_eq!(labels.of(1, Some(1)), NONE);
        assert_eq!(labels.of(1, None), NONE);
        assert!(labels.unused().is_empty());
    }

    #[test]
    fn quotes_and_columns_are_those_of_csv() {
        let mut labels =
            Labels::parse("\u{feff}id,label,sequence\nx,\"a \"\"b\"\", c\",0\ny, plain ,1\n")
                .unwrap();
        assert_eq!(labels.of(1, Some(0)), "a \"b\", c");
        assert_eq!(labels.of(1, Some(1)), "plain");
    }

    #[test]
    fn faults_name_their_line() {
        for (csv, expected) in [
            ("0,a\n1", "line 2: no comma"),
            ("0,a\nx,b", "line 2: \"x\" is not"),
            ("0,a\n1, ", "line 2: the label is missing"),
            ("0,a,b", "line 1: 3 fields instead of 2"),
            ("0,\"a", "line 1: a quoted field has no closing quote"),
            ("0,a\n0,b", "line 2: sequence 0 was \"a\""),
            ("sequence,label\n", "line 1: the file has no label"),
            (
                "sequence,label,label\n0,a,b",
                "line 1: two columns of the header have the same name",
            ),
            (
                "sequence,sequence,label\n0,1,a",
                "line 1: two columns of the header have the same name",
            ),
        ] {
            let error = Labels::parse(csv).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn inputs_in_their_order() {
        let mut labels = Labels::of_inputs(vec!["a".into(), "b".into()]);
        assert_eq!(labels.of(1, Some(3)), "a");
        assert_eq!(labels.of(2, None), "b");
        assert_eq!(labels.of(3, None), NONE);
    }
}
