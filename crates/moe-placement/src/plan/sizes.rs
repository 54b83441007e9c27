//! How many bytes each expert takes.

use std::collections::BTreeMap;

use super::Error;

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
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut lines = (1..)
            .zip(text.lines().map(str::trim))
            .filter(|(_, line)| !line.is_empty());
        let fault = |line, fault: String| Error::Sizes { line, fault };
        let Some((line, header)) = lines.next() else {
            return Err(fault(1, "the file is empty".into()));
        };
        let columns = fields(header);
        let place = |name: &str| columns.iter().position(|&column| column == name);
        let (Some(layer), Some(expert), Some(bytes)) =
            (place("layer"), place("expert"), place("bytes"))
        else {
            return Err(fault(line, format!("{header:?} is not the header")));
        };
        let mut sizes = ExpertSizes::default();
        for (line, text) in lines {
            let fields = fields(text);
            if fields.len() != columns.len() {
                let reason = format!(
                    "{text:?} has not the {} fields of the header",
                    columns.len()
                );
                return Err(fault(line, reason));
            }
            let numbers = (
                fields[layer].parse(),
                fields[expert].parse(),
                fields[bytes].parse::<u64>(),
            );
            let (Ok(layer), Ok(expert), Ok(bytes @ 1..)) = numbers else {
                return Err(fault(
                    line,
                    format!("{text:?} is not a layer, an expert and its bytes, at least 1"),
                ));
            };
            if sizes.bytes.insert((layer, expert), bytes).is_some() {
                return Err(fault(
                    line,
                    format!("expert {expert} of layer {layer} is there twice"),
                ));
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
