//! Labels (domains) of inputs and sequences.

use std::collections::HashMap;

use moe_files::csv::{self, Fields, LineReader};

use super::Error;

/// Reason to reject a file of labels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LabelFault {
    /// The line is not CSV.
    #[error("{0}")]
    Line(#[from] csv::LineFault),
    /// The line has more fields than the file has columns.
    #[error(
        "{fields} fields instead of {columns}: put double quotes around a label that contains a comma"
    )]
    TooManyFields {
        /// Number of fields in the line.
        fields: usize,
        /// Number of columns.
        columns: usize,
    },
    /// The line has no second field.
    #[error("no comma between sequence and label")]
    NoComma,
    /// The sequence is not a number.
    #[error("{found:?} is not a sequence number")]
    Sequence {
        /// The text in its place.
        found: String,
    },
    /// The label is empty.
    #[error("the label is missing")]
    NoLabel,
    /// The sequence has two labels.
    #[error("sequence {sequence} has the label {before:?} in an earlier line")]
    Repeated {
        /// The sequence.
        sequence: u32,
        /// Label in the earlier line.
        before: String,
    },
    /// The file contains no labels.
    #[error("the file contains no labels")]
    Empty,
}

/// Label of tokens without a label.
const NONE: &str = "(none)";

/// Labels of inputs, or of the sequences of an input.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Labels {
    /// Label of each input, in order.
    inputs: Vec<String>,
    /// Label of each sequence, and whether the sequence has tokens.
    sequences: HashMap<u32, (String, bool)>,
}

impl Labels {
    /// One label per input, in order.
    pub fn from_inputs(labels: Vec<String>) -> Labels {
        Labels {
            inputs: labels,
            ..Labels::default()
        }
    }

    /// Parses labels of sequences from CSV lines `sequence,label`. The first line may be a header; then the columns may be
    /// in any order, and other columns are ignored. Labels that contain commas or quotes are quoted as in RFC 4180. Empty
    /// lines are ignored.
    ///
    /// # Errors
    /// [`Error::Labels`] with the line number and the [`LabelFault`].
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

    /// Whether there are no labels.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty() && self.sequences.is_empty()
    }

    /// Label of a sequence of an input; inputs are numbered from 1.
    pub(super) fn of(&mut self, n_input: usize, sequence: Option<u32>) -> &str {
        let of_input = n_input.checked_sub(1).and_then(|n| self.inputs.get(n));
        let label = of_input.or_else(|| {
            let (label, is_used) = self.sequences.get_mut(&sequence?)?;
            *is_used = true;
            Some(label)
        });
        label.map_or(NONE, String::as_str)
    }

    /// Labeled sequences without tokens, in ascending order.
    pub(super) fn unused(&self) -> Vec<u32> {
        let unused = self.sequences.iter().filter(|(_, (_, is_used))| !is_used);
        let mut unused: Vec<u32> = unused.map(|(&sequence, _)| sequence).collect();
        unused.sort_unstable();
        unused
    }
}

/// Indices of the columns.
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
    /// Columns named in a header; `None` if the line is not a header. Without a column `label`, labels are in the column
    /// after the sequence.
    ///
    /// # Errors
    /// [`csv::LineFault`] if the header names a column twice.
    fn of_header(fields: Fields<'_>) -> Result<Option<Columns>, csv::LineFault> {
        let name = fields.iter().find(|name| name.starts_with("sequence"));
        let index = name.map(|name| fields.column_index(name)).transpose()?;
        let Some(sequence) = index.flatten() else {
            return Ok(None);
        };
        Ok(Some(Columns {
            sequence,
            label: fields.column_index("label")?.unwrap_or(sequence + 1),
            n: fields.len(),
        }))
    }

    /// Sequence and label in a line.
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
    fn parses_sequences_and_labels() {
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
    fn accepts_quotes_and_columns_in_any_order() {
        let mut labels =
            Labels::parse("\u{feff}id,label,sequence\nx,\"a \"\"b\"\", c\",0\ny, plain ,1\n")
                .unwrap();
        assert_eq!(labels.of(1, Some(0)), "a \"b\", c");
        assert_eq!(labels.of(1, Some(1)), "plain");
    }

    #[test]
    fn rejects_invalid_lines() {
        use csv::LineFault::RepeatedColumn;
        let too_many = LabelFault::TooManyFields {
            fields: 3,
            columns: 2,
        };
        let before = "a".to_owned();
        let found = "x".to_owned();
        for (csv, expected_line, expected) in [
            ("0,a\n1", 2, LabelFault::NoComma),
            ("0,a\nx,b", 2, LabelFault::Sequence { found }),
            ("0,a\n1, ", 2, LabelFault::NoLabel),
            ("0,a,b", 1, too_many),
            ("0,\"a", 1, csv::LineFault::OpenQuote.into()),
            (
                "0,a\n0,b",
                2,
                LabelFault::Repeated {
                    sequence: 0,
                    before,
                },
            ),
            ("sequence,label\n", 1, LabelFault::Empty),
            ("sequence,label,label\n0,a,b", 1, RepeatedColumn.into()),
            ("sequence,sequence,label\n0,1,a", 1, RepeatedColumn.into()),
        ] {
            let Err(Error::Labels { line, fault }) = Labels::parse(csv) else {
                panic!("{csv:?}");
            };
            assert_eq!((line, fault), (expected_line, expected), "{csv:?}");
        }
    }

    #[test]
    fn labels_inputs_in_order() {
        let mut labels = Labels::from_inputs(vec!["a".into(), "b".into()]);
        assert_eq!(labels.of(1, Some(3)), "a");
        assert_eq!(labels.of(2, None), "b");
        assert_eq!(labels.of(3, None), NONE);
    }
}
