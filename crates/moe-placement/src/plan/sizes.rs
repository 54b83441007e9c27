//! Sizes of experts in bytes.

use std::collections::BTreeMap;

use moe_files::csv::{self, LineReader};
use moe_ids::{ExpertId, LayerId};

use super::Error;

/// Fault in a table of sizes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SizesFault {
    /// The file has no lines.
    #[error("the file is empty")]
    Empty,
    /// The first line does not contain the column names.
    #[error("{line:?} is not the expected header")]
    Header {
        /// The line.
        line: String,
    },
    /// The line is not CSV.
    #[error("{0}")]
    Line(#[from] csv::LineFault),
    /// The number of fields differs from the header.
    #[error("{line:?} does not have {columns} fields like the header")]
    Fields {
        /// The line.
        line: String,
        /// Number of columns in the header.
        columns: usize,
    },
    /// A value is not an unsigned integer, an id is too large, or the size is 0.
    #[error("{line:?} does not contain a layer, an expert and a size of at least 1 byte")]
    Numbers {
        /// The line.
        line: String,
    },
    /// The expert appears a second time.
    #[error("expert {expert} of layer {layer} appears twice")]
    Repeated {
        /// Block number in the model.
        layer: LayerId,
        /// Expert id within its layer.
        expert: ExpertId,
    },
}

/// Sizes of the experts of a model in bytes, by layer and expert.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExpertSizes {
    bytes: BTreeMap<(LayerId, ExpertId), u64>,
}

impl ExpertSizes {
    /// Parses CSV with the columns `layer`, `expert` and `bytes` in any order. Ignores other columns and empty lines.
    ///
    /// # Errors
    /// [`Error::Sizes`] with the line number and the [`SizesFault`].
    pub fn from_csv(text: &str) -> Result<ExpertSizes, Error> {
        let mut reader = LineReader::default();
        let mut lines = csv::lines(text);
        let Some((line, header)) = lines.next() else {
            let fault = SizesFault::Empty;
            return Err(Error::Sizes { line: 1, fault });
        };
        let columns = Columns::of(header, &mut reader);
        let columns = columns.map_err(|fault| Error::Sizes { line, fault })?;
        let mut sizes = ExpertSizes::default();
        for (line, text) in lines {
            let expert = columns.expert(text, &mut reader);
            let added = expert.and_then(|(layer, expert, bytes)| {
                match sizes.bytes.insert((layer, expert), bytes) {
                    Some(_) => Err(SizesFault::Repeated { layer, expert }),
                    None => Ok(()),
                }
            });
            added.map_err(|fault| Error::Sizes { line, fault })?;
        }
        Ok(sizes)
    }

    /// Size of an expert in bytes; `None` if it is unknown.
    pub fn get(&self, layer: LayerId, expert: ExpertId) -> Option<u64> {
        self.bytes.get(&(layer, expert)).copied()
    }

    /// `(layer, expert, bytes)`, sorted by layer and expert.
    pub fn iter(&self) -> impl Iterator<Item = (LayerId, ExpertId, u64)> {
        self.bytes
            .iter()
            .map(|(&(layer, expert), &bytes)| (layer, expert, bytes))
    }

    /// Whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Total size of the experts of each layer, in bytes.
    pub fn layers(&self) -> BTreeMap<LayerId, u64> {
        let mut layers = BTreeMap::new();
        for (layer, _, bytes) in self.iter() {
            let total: &mut u64 = layers.entry(layer).or_default();
            *total = total.saturating_add(bytes);
        }
        layers
    }

    /// Bytes of a lane that contains all experts, and the empty expert of each layer: see [`Lane`](super::Lane). An empty expert is
    /// assumed to be as large as the largest expert of its layer.
    pub fn bytes_of_all(&self) -> u64 {
        let mut empty: BTreeMap<LayerId, u64> = BTreeMap::new();
        for (layer, _, bytes) in self.iter() {
            let largest = empty.entry(layer).or_default();
            *largest = bytes.max(*largest);
        }
        let layers = self.layers();
        let all = layers.values().chain(empty.values());
        all.copied().fold(0, u64::saturating_add)
    }
}

/// Indices of the columns.
struct Columns {
    layer: usize,
    expert: usize,
    bytes: usize,
    n: usize,
}

impl Columns {
    fn of(header: &str, reader: &mut LineReader) -> Result<Columns, SizesFault> {
        let names = reader.fields(header)?;
        let index = |column| {
            let missing = || SizesFault::Header {
                line: header.to_owned(),
            };
            names.column_index(column)?.ok_or_else(missing)
        };
        Ok(Columns {
            layer: index("layer")?,
            expert: index("expert")?,
            bytes: index("bytes")?,
            n: names.len(),
        })
    }

    /// Layer, expert and bytes in a line.
    fn expert(
        &self,
        line: &str,
        reader: &mut LineReader,
    ) -> Result<(LayerId, ExpertId, u64), SizesFault> {
        let fields = reader.fields(line)?;
        if fields.len() != self.n {
            return Err(SizesFault::Fields {
                line: line.to_owned(),
                columns: self.n,
            });
        }
        let number = |index| -> Option<u64> { fields.get(index)?.parse().ok() };
        let layer = number(self.layer).and_then(|n| LayerId::try_from(n).ok());
        let expert = number(self.expert).and_then(|n| ExpertId::try_from(n).ok());
        match (layer, expert, number(self.bytes)) {
            (Some(layer), Some(expert), Some(bytes @ 1..)) => Ok((layer, expert, bytes)),
            _ => Err(SizesFault::Numbers {
                line: line.to_owned(),
            }),
        }
    }
}

/// Like the fork, uses the last size of a repeated expert and omits experts of size 0.
impl FromIterator<(LayerId, ExpertId, u64)> for ExpertSizes {
    fn from_iter<I: IntoIterator<Item = (LayerId, ExpertId, u64)>>(sizes: I) -> ExpertSizes {
        let sizes = sizes.into_iter().filter(|&(.., bytes)| bytes > 0);
        ExpertSizes {
            bytes: sizes
                .map(|(layer, expert, bytes)| ((layer, expert), bytes))
                .collect(),
        }
    }
}
