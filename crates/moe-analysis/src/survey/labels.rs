//! Which domain a token is of.

use std::collections::HashMap;

use super::Error;

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

    /// Labels of sequences from lines `sequence,label`; a header and empty lines are passed over.
    ///
    /// # Errors
    /// [`Error::Labels`] for a line that is none, or a sequence that is named twice with two labels.
    pub fn parse(csv: &str) -> Result<Labels, Error> {
        let mut sequences = HashMap::new();
        for (line, text) in (1..).zip(csv.lines().map(str::trim)) {
            let fail = |reason: String| Err(Error::Labels { line, reason });
            if text.is_empty() || (line == 1 && text.starts_with("sequence")) {
                continue;
            }
            let Some((sequence, label)) = text.split_once(',') else {
                return fail("no comma".into());
            };
            let label = label.trim().trim_matches('"').to_owned();
            let Ok(sequence) = sequence.trim().parse::<u32>() else {
                return fail(format!("{sequence:?} is not the number of a sequence"));
            };
            if label.is_empty() {
                return fail("the label is missing".into());
            }
            match sequences.insert(sequence, (label.clone(), false)) {
                Some((before, _)) if before != label => {
                    return fail(format!("sequence {sequence} was {before:?} before"));
                }
                _ => {}
            }
        }
        if sequences.is_empty() {
            return Err(Error::Labels {
                line: 1,
                reason: "there is no label".into(),
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
    fn faults_name_their_line() {
        for (csv, expected) in [
            ("0,a\n1", "line 2: no comma"),
            ("0,a\nx,b", "line 2: \"x\" is not"),
            ("0,a\n1, ", "line 2: the label is missing"),
            ("0,a\n0,b", "line 2: sequence 0 was \"a\""),
            ("sequence,label\n", "line 1: there is no label"),
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
