//! Why a learn file is refused.

use super::{OLD_SCHEMA, SCHEMA};
use crate::json::JsonError;

/// Why a learn file is refused. The runtime refuses the same files, but for [`Error::WideId`] and [`Error::Model`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not JSON.
    #[error("the learn file is not JSON: {0}; write the file again")]
    Json(#[from] JsonError),
    /// The root is not an object, or its schema is not one of the two known names.
    #[error("the learn file's `schema` is {found}; it must be \"{SCHEMA}\" or \"{OLD_SCHEMA}\"")]
    Schema {
        /// What stands there instead.
        found: String,
    },
    /// No `layers` array.
    #[error("the learn file has no `layers` array; it must hold one object for each layer")]
    Layers,
    /// A layer without an unsigned id.
    #[error("layers[{index}] of the learn file has no unsigned integer `layer`")]
    LayerId {
        /// Position in `layers`.
        index: usize,
    },
    /// An array of counts that is not made of pairs.
    #[error(
        "`{key}` in layers[{index}] of the learn file must be an array of [expert_id, count] pairs of unsigned integers"
    )]
    Experts {
        /// Position in `layers`.
        index: usize,
        /// Key of the faulty array.
        key: &'static str,
    },
    /// A layer that no model has.
    #[error("layers[{index}] of the learn file is of layer {id}, which no model has; correct it")]
    NoLayer {
        /// Position in `layers`.
        index: usize,
        /// The layer.
        id: u64,
    },
    /// An id that the runtime would cut to its lower 32 bits and so take for another layer or expert.
    #[error(
        "`{key}` in layers[{index}] of the learn file holds the id {id}, which does not fit 32 bits; the runtime would take \
         it for {}; correct the id", *.id & 0xFFFF_FFFF
    )]
    WideId {
        /// Position in `layers`.
        index: usize,
        /// Key of the faulty value.
        key: &'static str,
        /// The id.
        id: u64,
    },
    /// A number of the wrong JSON type.
    #[error("`{key}` in layers[{index}] of the learn file must be a number")]
    Number {
        /// Position in `layers`.
        index: usize,
        /// Key of the faulty value.
        key: &'static str,
    },
    /// Files that cannot be of one model.
    #[error(
        "the learn files are of different models: `{key}` is {one} in one and {other} in another; merge files of one model"
    )]
    Model {
        /// The key that tells it.
        key: &'static str,
        /// Its value in the first file.
        one: String,
        /// Its value in a later file.
        other: String,
    },
}
