//! How many bytes each expert takes.

use std::collections::BTreeMap;

use moe_files::csv::{self, LineReader};
use moe_ids::{ExpertId, LayerId};

use super::Error;

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
    /// A line that is not CSV.
    #[error("{0}")]
    Line(#[from] csv::LineFault),
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
        layer: LayerId,
        /// Expert in the layer.
        expert: ExpertId,
    },
}

/// Bytes of each expert of a model, by layer and expert.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExpertSizes {
    bytes: BTreeMap<(LayerId, ExpertId), u64>,
}

impl ExpertSizes {
    /// Reads CSV whose header names `layer`, `expert` and `bytes`, in any order; other columns and empty lines are ignored.
    ///
    /// # Errors
    /// [`Error::Sizes`] with the line: no header, fewer values than columns, not unsigned numbers, no bytes, or an expert for
    /// the second time.
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

    /// Bytes of an expert, if the model has it.
    pub fn get(&self, layer: LayerId, expert: ExpertId) -> Option<u64> {
        self.bytes.get(&(layer, expert)).copied()
    }

    /// `(layer, expert, bytes)` in order.
    pub fn iter(&self) -> impl Iterator<Item = (LayerId, ExpertId, u64)> {
        self.bytes
            .iter()
            .map(|(&(layer, expert), &bytes)| (layer, expert, bytes))
    }

    /// Whether no expert is known.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Bytes of all experts of each layer.
    pub fn layers(&self) -> BTreeMap<LayerId, u64> {
        let mut layers = BTreeMap::new();
        for (layer, _, bytes) in self.iter() {
            let total: &mut u64 = layers.entry(layer).or_default();
            *total = total.saturating_add(bytes);
        }
        layers
    }
}

/// Places of the columns.
struct Columns {
    layer: usize,
    expert: usize,
    bytes: usize,
    n: usize,
}

impl Columns {
    fn of(header: &str, reader: &mut LineReader) -> Result<Columns, SizesFault> {
        let names = reader.fields(header)?;
        let place = |column| {
            let missing = || SizesFault::Header {
                line: header.to_owned(),
            };
            names.place_of(column)?.ok_or_else(missing)
        };
        Ok(Columns {
            layer: place("layer")?,
            expert: place("expert")?,
            bytes: place("bytes")?,
            n: names.len(),
        })
    }

    /// Layer, expert and bytes of a line.
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
        let number = |place| -> Option<u64> { fields.get(place)?.parse().ok() };
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

/// Of an expert that is there twice, the later size counts; one without bytes is left out. Both as in the runtime.
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
