//! How many bytes each expert takes.

use std::collections::BTreeMap;

use super::Error;
use crate::text::without_byte_order_mark;

/// Why a table of sizes is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizesFault {
    /// A file without lines.
    #[error("the file is empty")]
    Empty,
    /// A first line that does not name the columns.
    #[error("{line:?} is not the header")]
    Header {
        /// The line.
        line: String,
    },
    /// A line with fewer or more values than columns.
    #[error("{line:?} does not have the {columns} fields of the header")]
    Fields {
        /// The line.
        line: String,
        /// Columns of the file.
        columns: usize,
    },
    /// A line whose values are not unsigned numbers, or whose expert has no bytes.
    #[error("{line:?} is not a layer, an expert and its bytes, at least 1")]
    Numbers {
        /// The line.
        line: String,
    },
    /// An expert for the second time.
    #[error("expert {expert} of layer {layer} appears twice")]
    Repeated {
        /// Block number.
        layer: u32,
        /// Expert in the layer.
        expert: u32,
    },
}

/// Bytes of each expert of a model, by layer and expert.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExpertSizes {
    bytes: BTreeMap<(u32, u32), u64>,
}

impl ExpertSizes {
    /// Reads CSV whose header names `layer`, `expert` and `bytes`, in any order; other columns and empty lines are ignored.
    ///
    /// # Errors
    /// [`Error::Sizes`] with the line: no header, fewer values than columns, not unsigned numbers, no bytes, or an expert for
    /// the second time.
    pub fn from_csv(text: &str) -> Result<ExpertSizes, Error> {
        let mut lines = (1..)
            .zip(without_byte_order_mark(text).lines().map(str::trim))
            .filter(|(_, line)| !line.is_empty());
        let fail = |line, fault| Err(Error::Sizes { line, fault });
        let Some((line, header)) = lines.next() else {
            return fail(1, SizesFault::Empty);
        };
        let columns = fields(header);
        let place = |name: &str| columns.iter().position(|&column| column == name);
        let (Some(layer), Some(expert), Some(bytes)) =
            (place("layer"), place("expert"), place("bytes"))
        else {
            let header = header.to_owned();
            return fail(line, SizesFault::Header { line: header });
        };
        let mut sizes = ExpertSizes::default();
        for (line, text) in lines {
            let fields = fields(text);
            if fields.len() != columns.len() {
                let (text, columns) = (text.to_owned(), columns.len());
                return fail(
                    line,
                    SizesFault::Fields {
                        line: text,
                        columns,
                    },
                );
            }
            let numbers = (
                fields[layer].parse(),
                fields[expert].parse(),
                fields[bytes].parse::<u64>(),
            );
            let (Ok(layer), Ok(expert), Ok(bytes @ 1..)) = numbers else {
                let text = text.to_owned();
                return fail(line, SizesFault::Numbers { line: text });
            };
            if sizes.bytes.insert((layer, expert), bytes).is_some() {
                return fail(line, SizesFault::Repeated { layer, expert });
            }
        }
        Ok(sizes)
    }

    /// Bytes of an expert, if the model has it.
    pub fn get(&self, layer: u32, expert: u32) -> Option<u64> {
        self.bytes.get(&(layer, expert)).copied()
    }

    /// `(layer, expert, bytes)` in order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32, u64)> {
        self.bytes
            .iter()
            .map(|(&(layer, expert), &bytes)| (layer, expert, bytes))
    }

    /// Whether no expert is known.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Bytes of all experts of each layer.
    pub fn layers(&self) -> BTreeMap<u32, u64> {
        let mut layers = BTreeMap::new();
        for (layer, _, bytes) in self.iter() {
            let total: &mut u64 = layers.entry(layer).or_default();
            *total = total.saturating_add(bytes);
        }
        layers
    }
}

/// The fields of a line, without white space and quotes around them.
fn fields(line: &str) -> Vec<&str> {
    line.split(',')
        .map(|field| field.trim().trim_matches('"'))
        .collect()
}

/// Of an expert that is there twice, the later size counts; one without bytes is left out. Both as in the runtime.
impl FromIterator<(u32, u32, u64)> for ExpertSizes {
    fn from_iter<I: IntoIterator<Item = (u32, u32, u64)>>(sizes: I) -> ExpertSizes {
        let sizes = sizes.into_iter().filter(|&(.., bytes)| bytes > 0);
        ExpertSizes {
            bytes: sizes
                .map(|(layer, expert, bytes)| ((layer, expert), bytes))
                .collect(),
        }
    }
}
