//! Operation numbers and names.
//!
//! ggml's numbers change between llama.cpp versions, so a manifest contains the table of its run. Runs of this crate use
//! the 95 numbers of the llama.cpp version that recorded the published traces, and further numbers for newer operations.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// Number of `ADD_ID` in the default table.
pub const ADD_ID: u8 = 3;
/// Number of `MUL_MAT` in the default table.
pub const MUL_MAT: u8 = 29;
/// Number of `MUL_MAT_ID` in the default table.
pub const MUL_MAT_ID: u8 = 30;
/// Number of `GET_ROWS` in the default table.
pub const GET_ROWS: u8 = 40;

static DEFAULT: LazyLock<OpTable> = LazyLock::new(|| OpTable {
    names: include_str!("../data/ggml-ops.csv")
        .lines()
        .filter_map(|line| line.split_once(','))
        .filter_map(|(number, name)| Some((number.parse().ok()?, name.to_owned())))
        .collect(),
});

/// Names of operations by number: `ops` in the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OpTable {
    names: BTreeMap<u8, String>,
}

impl OpTable {
    /// The name of an operation number.
    pub fn name(&self, number: u8) -> Option<&str> {
        self.names.get(&number).map(String::as_str)
    }

    /// The number of an operation name.
    pub fn number(&self, name: &str) -> Option<u8> {
        self.names
            .iter()
            .find(|(_, n)| *n == name)
            .map(|(number, _)| *number)
    }

    /// Pairs of number and name, in the order of the numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u8, &str)> {
        self.names
            .iter()
            .map(|(number, name)| (*number, name.as_str()))
    }
}

impl Default for OpTable {
    fn default() -> Self {
        DEFAULT.clone()
    }
}

impl FromIterator<(u8, String)> for OpTable {
    fn from_iter<I: IntoIterator<Item = (u8, String)>>(iter: I) -> Self {
        Self {
            names: iter.into_iter().collect(),
        }
    }
}

/// The table of runs that this crate writes.
pub fn default_table() -> &'static OpTable {
    &DEFAULT
}

/// The name of a number in the default table.
pub fn name(number: u8) -> Option<&'static str> {
    DEFAULT.name(number)
}

/// The number of a name in the default table.
pub fn number(name: &str) -> Option<u8> {
    DEFAULT.number(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_table_has_all_numbers() {
        let numbers: Vec<u8> = default_table().iter().map(|(number, _)| number).collect();
        assert_eq!(numbers, (0..96).collect::<Vec<u8>>());
        for (constant, expected) in [
            (ADD_ID, "ADD_ID"),
            (MUL_MAT, "MUL_MAT"),
            (MUL_MAT_ID, "MUL_MAT_ID"),
            (GET_ROWS, "GET_ROWS"),
        ] {
            assert_eq!(name(constant), Some(expected));
            assert_eq!(number(expected), Some(constant));
        }
        assert_eq!(name(94), Some("GLU"));
        assert_eq!(name(96), None);
    }
}
