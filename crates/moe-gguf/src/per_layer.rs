//! Hyperparameters that a file stores as one number, or as an array with one number per layer.

use std::fmt;

use crate::value::Value;

/// Maximum number of layers: 65,535 means "no layer" in traces.
const MAX_LAYERS: u64 = 65_535;

/// A hyperparameter that a file stores as one number for all layers, or as an array with one number per layer.
///
/// llama.cpp reads such keys with `get_key_or_arr` (feed-forward width, head counts, selected experts, …).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PerLayer {
    /// One value for all layers.
    Same(u64),
    /// One value for each layer, in order. The list may be empty, or longer or shorter than the number of layers.
    Each(Vec<u64>),
}

impl PerLayer {
    /// All values: the single value, or the list.
    pub fn values(&self) -> &[u64] {
        match self {
            PerLayer::Same(value) => std::slice::from_ref(value),
            PerLayer::Each(values) => values,
        }
    }

    /// The value of a layer, or `None` past the end of the list.
    pub fn get(&self, layer: usize) -> Option<u64> {
        match self {
            PerLayer::Same(value) => Some(*value),
            PerLayer::Each(values) => values.get(layer).copied(),
        }
    }

    /// The common value of all layers, or `None` if the values differ or the list is empty.
    pub fn uniform(&self) -> Option<u64> {
        let (first, rest) = self.values().split_first()?;
        rest.iter().all(|value| value == first).then_some(*first)
    }

    /// The common value of all layers with a non-zero value: 2 for `[0, 2, 0, 2]`, where two layers have no experts.
    ///
    /// `None` if the non-zero values differ, or if all values are 0.
    pub fn uniform_nonzero(&self) -> Option<u64> {
        let mut values = self.values().iter().filter(|&&value| value > 0);
        let first = values.next()?;
        values.all(|value| value == first).then_some(*first)
    }

    /// The largest value, or `None` if the list is empty.
    pub fn max(&self) -> Option<u64> {
        self.values().iter().max().copied()
    }

    /// Converts a value of the key-value section. The error describes a value of another type.
    pub(crate) fn from_value(value: &Value) -> Result<PerLayer, String> {
        let number = |value: &Value| u64::try_from(value.as_i128()?).ok();
        let Value::Array(array) = value else {
            return match number(value) {
                Some(number) => Ok(PerLayer::Same(number)),
                None => Err(value.describe()),
            };
        };
        if array.len() > MAX_LAYERS {
            return Err(value.describe());
        }
        let mut values = Vec::new();
        for (i, element) in array.iter().enumerate() {
            match number(&element) {
                Some(number) => values.push(number),
                None => return Err(format!("{} with {element} at index {i}", value.describe())),
            }
        }
        Ok(PerLayer::Each(values))
    }
}

impl fmt::Display for PerLayer {
    /// Writes `2` or `[0, 2, 0, 2]`. Lists of more than 128 values are shortened.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 128;
        let values = match self {
            PerLayer::Same(value) => return value.fmt(f),
            PerLayer::Each(values) => values,
        };
        f.write_str("[")?;
        for (i, value) in values.iter().take(SHOWN).enumerate() {
            write!(f, "{}{value}", if i > 0 { ", " } else { "" })?;
        }
        match values.len() {
            0..=SHOWN => f.write_str("]"),
            n => write!(f, ", … ({n} values)]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn each(values: &[u64]) -> PerLayer {
        PerLayer::Each(values.to_vec())
    }

    #[test]
    fn uniform_requires_equal_values() {
        assert_eq!(PerLayer::Same(2).uniform(), Some(2));
        assert_eq!(each(&[2, 2, 2]).uniform(), Some(2));
        assert_eq!(each(&[2, 4]).uniform(), None);
        assert_eq!(each(&[]).uniform(), None);
        assert_eq!(each(&[0, 2, 0, 2]).uniform(), None);
    }

    #[test]
    fn uniform_nonzero_ignores_layers_without_experts() {
        assert_eq!(each(&[0, 2, 0, 2]).uniform_nonzero(), Some(2));
        assert_eq!(each(&[0, 2, 4]).uniform_nonzero(), None);
        assert_eq!(each(&[0, 0]).uniform_nonzero(), None);
        assert_eq!(PerLayer::Same(0).uniform_nonzero(), None);
    }

    #[test]
    fn returns_the_value_of_a_layer() {
        assert_eq!(PerLayer::Same(7).get(1000), Some(7));
        assert_eq!(each(&[1, 2]).get(1), Some(2));
        assert_eq!(each(&[1, 2]).get(2), None);
        assert_eq!(each(&[1, 9, 2]).max(), Some(9));
    }

    #[test]
    fn displays_lists_shortened() {
        assert_eq!(each(&[0, 2]).to_string(), "[0, 2]");
        assert_eq!(each(&[]).to_string(), "[]");
        let long = each(&[1; 200]).to_string();
        assert!(long.ends_with("1, … (200 values)]"), "{long}");
    }
}
