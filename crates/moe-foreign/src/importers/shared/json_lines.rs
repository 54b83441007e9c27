//! Helpers that the JSONL importers share.

use std::collections::HashMap;
use std::fmt;

use moe_trace::{LayerId, RoutingRow, TokenId};
use serde::de::{Deserialize, DeserializeOwned, Deserializer, SeqAccess, Visitor};

use crate::source::Lines;
use crate::{ForeignError, Output, Source, json};

use super::text::LineError;

/// Whether the first line of a sample is an object with these keys.
///
/// Only the keys are checked. So a line that the sample truncates, or that contains `NaN`, is recognized, and the importer
/// reports the error.
pub(in crate::importers) fn first_line_has(sample: &[u8], keys: &[&str]) -> bool {
    let sample = sample.trim_ascii_start();
    let line = sample.split(|&byte| byte == b'\n').next();
    let found = line.map(object_keys).unwrap_or_default();
    keys.iter().all(|key| found.contains(&key.as_bytes()))
}

/// The keys of the object at the start of a line, without those of nested objects.
fn object_keys(line: &[u8]) -> Vec<&[u8]> {
    let mut keys = Vec::new();
    if !line.starts_with(b"{") {
        return keys;
    }
    let mut depth = 0usize;
    let mut at = 0;
    while let Some(&byte) = line.get(at) {
        match byte {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'"' => {
                let start = at + 1;
                at = start + string_length(&line[start..]);
                let after = line.get(at + 1..).unwrap_or_default();
                if depth == 1 && after.trim_ascii_start().starts_with(b":") {
                    keys.push(&line[start..at]);
                }
            }
            _ => {}
        }
        at += 1;
    }
    keys
}

/// Number of bytes of a JSON string before its closing quote, or the rest of the text.
fn string_length(text: &[u8]) -> usize {
    let mut is_escaped = false;
    let end = text.iter().position(|&byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    });
    end.unwrap_or(text.len())
}

/// Calls `import` with every line of every file and its number. A truncated last line is skipped with a note.
pub(in crate::importers) fn for_each_line<'o, L: DeserializeOwned>(
    source: &Source,
    output: &mut Output<'o>,
    mut import: impl FnMut(&L, u64, &mut Output<'o>) -> Result<(), ForeignError>,
) -> Result<(), ForeignError> {
    for file in source.files() {
        output.begin_file(file);
        let mut lines = Lines::open(file)?;
        while let Some((number, text)) = lines.next_line()? {
            match json::line(file, number, text) {
                Ok(line) => import(&line, number, output)?,
                Err(error) => lines.skip_truncated(error, output)?,
            }
        }
    }
    Ok(())
}

/// Detects files that mix the tokens of several runs or sequences without distinguishing them.
#[derive(Default)]
pub(in crate::importers) struct TokenOrder {
    /// The last token, by sequence and layer.
    last: HashMap<(Option<u32>, LayerId), TokenId>,
    has_warned: bool,
}

impl TokenOrder {
    /// Checks the token of a line, and warns once if its position does not follow the previous token.
    pub(in crate::importers) fn check(
        &mut self,
        row: &RoutingRow,
        line: u64,
        output: &mut Output<'_>,
    ) {
        let key = (row.sequence_id, row.layer_id);
        let before = self.last.insert(key, row.token_id);
        if !self.has_warned && before.is_some_and(|before| row.token_id <= before) {
            self.has_warned = true;
            output.note(format!(
                "warning: line {line} returns to token {} of layer {}: the file contains several runs or sequences and does not \
                 distinguish them; convert each run separately",
                row.token_id, row.layer_id
            ));
        }
    }
}

/// Pairs of an expert id and its weight, if it is known; `null` is an unknown weight.
///
/// # Errors
/// [`LineError::Weights`] if the lists differ in length.
pub(in crate::importers) fn zip_weights<'a>(
    experts: &'a [i64],
    weights: Option<&'a [Option<f32>]>,
) -> Result<impl Iterator<Item = (i64, Option<f32>)> + use<'a>, LineError> {
    if let Some(weights) = weights
        && weights.len() != experts.len()
    {
        return Err(LineError::Weights {
            weights: weights.len(),
            experts: experts.len(),
        });
    }
    let weight = move |slot: usize| weights.and_then(|weights| weights[slot]);
    Ok((0..)
        .zip(experts)
        .map(move |(slot, &expert)| (expert, weight(slot))))
}

/// A list of lists in one allocation. A `Vec` of many short `Vec`s takes far more memory than its text.
pub(in crate::importers) struct Nested<T> {
    values: Vec<T>,
    /// The end of each list in `values`.
    ends: Vec<usize>,
}

impl<T> Nested<T> {
    /// Number of lists.
    pub(in crate::importers) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The lists.
    pub(in crate::importers) fn iter(&self) -> impl Iterator<Item = &[T]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .map(|(start, &end)| &self.values[start..end])
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Nested<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Lists<T>(Nested<T>);
        struct List<'a, T>(&'a mut Vec<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Lists<T> {
            type Value = Nested<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of lists")
            }

            fn visit_seq<A: SeqAccess<'de>>(mut self, mut lists: A) -> Result<Nested<T>, A::Error> {
                while lists.next_element_seed(List(&mut self.0.values))?.is_some() {
                    self.0.ends.push(self.0.values.len());
                }
                Ok(self.0)
            }
        }

        impl<'de, T: Deserialize<'de>> serde::de::DeserializeSeed<'de> for List<'_, T> {
            type Value = ();

            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
                deserializer.deserialize_seq(self)
            }
        }

        impl<'de, T: Deserialize<'de>> Visitor<'de> for List<'_, T> {
            type Value = ();

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
                while let Some(value) = list.next_element()? {
                    self.0.push(value);
                }
                Ok(())
            }
        }

        deserializer.deserialize_seq(Lists(Nested {
            values: Vec::new(),
            ends: Vec::new(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_lists_keep_their_shape() {
        let nested: Nested<i64> = serde_json::from_str("[[1,2],[],[3]]").unwrap();
        let lists: Vec<&[i64]> = nested.iter().collect();
        assert_eq!(lists, [&[1, 2][..], &[], &[3]]);
        assert_eq!(nested.len(), 3);
        assert!(serde_json::from_str::<Nested<i64>>("[1]").is_err());
    }

    #[test]
    fn recognizes_the_first_line_by_its_keys() {
        let keys = ["layer", "experts"];
        for line in [
            r#"{"layer":0,"experts":[1]}"#,
            r#"{"layer":0,"experts" : [1,"#,
            r#"{"layer":NaN,"a":"\"}","experts":[Infinity]}"#,
        ] {
            assert!(first_line_has(line.as_bytes(), &keys), "{line}");
        }
        for line in [
            r#"{"layer":0}"#,
            r#"{"layer":0,"a":"experts"}"#,
            r#"{"layer":0,"a":{"experts":[1]}}"#,
            r#"["layer","experts":1]"#,
            r#"x{"layer":0,"experts":[1]}"#,
            r#"{"layer":0,"experts"#,
        ] {
            assert!(!first_line_has(line.as_bytes(), &keys), "{line}");
        }
    }
}
