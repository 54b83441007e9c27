//! What the JSONL formats share.

use std::fmt;

use moe_gguf::text::counted;
use serde::de::{Deserialize, DeserializeOwned, Deserializer, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::foreign::{ForeignError, Lines, Output, SAMPLE_SIZE, Source, json_line};

/// Whether the first line of a sample is a JSON object with these keys. Of a line that the sample cuts, the text tells.
pub(super) fn first_line_has(sample: &[u8], keys: &[&str]) -> bool {
    let sample = sample.trim_ascii_start();
    let end = sample.iter().position(|&byte| byte == b'\n');
    let is_cut = end.is_none() && sample.len() >= SAMPLE_SIZE - 16;
    let line = &sample[..end.unwrap_or(sample.len())];
    if !line.starts_with(b"{") {
        return false;
    }
    if is_cut {
        let text = String::from_utf8_lossy(line);
        return keys.iter().all(|key| text.contains(&format!("\"{key}\"")));
    }
    serde_json::from_slice::<Map<String, Value>>(line)
        .is_ok_and(|object| keys.iter().all(|&key| object.contains_key(key)))
}

/// Hands every line of every file to `take`, with its number. A last line that is cut is noted and left out.
pub(super) fn each_line<'o, L: DeserializeOwned>(
    source: &Source,
    output: &mut Output<'o>,
    mut take: impl FnMut(&L, u64, &mut Output<'o>) -> Result<(), ForeignError>,
) -> Result<(), ForeignError> {
    for file in source.files() {
        output.begin_file(file);
        let mut lines = Lines::open(file)?;
        while let Some((number, text)) = lines.next_line()? {
            match json_line(file, number, text) {
                Ok(line) => take(&line, number, output)?,
                Err(error) => lines.cut_or(error, output)?,
            }
        }
    }
    Ok(())
}

/// Experts with their weights, if there are any.
pub(super) fn zip_weights<'a>(
    experts: &'a [i64],
    weights: Option<&'a [f32]>,
) -> Result<impl Iterator<Item = (i64, Option<f32>)> + use<'a>, String> {
    if let Some(weights) = weights
        && weights.len() != experts.len()
    {
        return Err(format!(
            "{} for {}; the line is damaged",
            counted(weights.len(), "weight"),
            counted(experts.len(), "expert")
        ));
    }
    let weight = move |slot: usize| weights.map(|weights| weights[slot]);
    Ok((0..)
        .zip(experts)
        .map(move |(slot, &expert)| (expert, weight(slot))))
}

/// A list of lists, held as one: a list of many short lists would cost far more memory than its text.
pub(super) struct Nested<T> {
    values: Vec<T>,
    /// Where each list ends in `values`.
    ends: Vec<usize>,
}

impl<T> Nested<T> {
    /// Number of lists.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The lists.
    pub(super) fn iter(&self) -> impl Iterator<Item = &[T]> {
        let begins = std::iter::once(0).chain(self.ends.iter().copied());
        begins
            .zip(&self.ends)
            .map(|(begin, &end)| &self.values[begin..end])
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
    fn a_cut_first_line_is_judged_by_its_text() {
        let mut sample = br#"{"layer":0,"topk_experts":["#.to_vec();
        sample.resize(SAMPLE_SIZE, b'1');
        assert!(first_line_has(&sample, &["layer", "topk_experts"]));
        assert!(!first_line_has(&sample, &["layer", "batch_id"]));
        assert!(!first_line_has(
            br#"{"layer":0,"topk_experts":["#,
            &["layer"]
        ));
    }
}
