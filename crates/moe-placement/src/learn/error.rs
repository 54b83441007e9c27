//! Reasons to reject a learn file.

use super::{OLD_SCHEMA, SCHEMA};
use crate::json::JsonError;

/// Reason to reject a learn file. The fork rejects the same files, except those of [`Error::RepeatedKey`],
/// [`Error::WideId`], [`Error::Unsigned`] and [`Error::Model`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not JSON.
    #[error("the learn file is not valid JSON: {0}; record it again")]
    Json(#[source] JsonError),
    /// An object contains a key twice. The fork would use the last value.
    #[error("the learn file is ambiguous: {0}")]
    RepeatedKey(#[source] JsonError),
    /// The root is not an object, or its schema is unknown.
    #[error(
        "the learn file has an unsupported `schema`: {found}; expected \"{SCHEMA}\" or \"{OLD_SCHEMA}\""
    )]
    Schema {
        /// The value of `schema`, or a note that it is missing.
        found: String,
    },
    /// No `layers` array.
    #[error("the learn file has no `layers` array; it must contain one object per layer")]
    Layers,
    /// A layer has no unsigned integer `layer`.
    #[error("layers[{index}] of the learn file has no unsigned integer `layer`")]
    LayerId {
        /// Index in `layers`.
        index: usize,
    },
    /// An array of counts does not consist of pairs.
    #[error(
        "`{key}` in layers[{index}] of the learn file must be an array of [expert_id, count] pairs of unsigned integers"
    )]
    Experts {
        /// Index in `layers`.
        index: usize,
        /// Key of the array.
        key: &'static str,
    },
    /// The layer number is above the limit of all models.
    #[error(
        "layers[{index}] of the learn file has the layer number {id}, which is too large; correct it"
    )]
    NoLayer {
        /// Index in `layers`.
        index: usize,
        /// The layer number.
        id: u64,
    },
    /// An id does not fit in 32 bits. The fork would truncate it to another layer or expert.
    #[error(
    "`{key}` in layers[{index}] of the learn file contains the id {id}, which does not fit in 32 bits; the hot expert cache would read \
         it for {}; correct the id", *.id & 0xFFFF_FFFF
    )]
    WideId {
        /// Index in `layers`.
        index: usize,
        /// Key that contains the id.
        key: &'static str,
        /// The id.
        id: u64,
    },
    /// A value has the wrong JSON type.
    #[error("`{key}` in layers[{index}] of the learn file must be a number")]
    Number {
        /// Index in `layers`.
        index: usize,
        /// Key of the value.
        key: &'static str,
    },
    /// A number of [`LearnFile::totals`](super::LearnFile::totals) is not an unsigned integer.
    #[error("`{key}` of the learn file must be an integer from 0 to {max}")]
    Unsigned {
        /// Where the value is, for example `layers[3].calls`.
        key: String,
        /// Maximum of the value.
        max: u64,
    },
    /// The files are of different models.
    #[error(
        "the learn files are of different models: `{key}` is {one} in one and {other} in another; merge files of one model"
    )]
    Model {
        /// The key that differs.
        key: &'static str,
        /// Value in the first file.
        one: String,
        /// Value in a later file.
        other: String,
    },
}

impl From<JsonError> for Error {
    fn from(error: JsonError) -> Self {
        match error {
            JsonError::RepeatedKey { .. } => Self::RepeatedKey(error),
            _ => Self::Json(error),
        }
    }
}
