//! Identifiers of layers, experts and tokens, shared by the crates for models, placements and traces.
//!
//! An identifier has no sentinel value: the layer of a tensor without a layer is `None`. Readers convert the sentinels of file
//! formats (-1, 65,535) at the boundary.
//!
//! ```
//! use moe_ids::{ExpertId, LayerId};
//!
//! let (layer, expert) = (LayerId(3), ExpertId::try_from(17_i32)?);
//! assert_eq!(format!("expert {expert} of layer {layer}"), "expert 17 of layer 3");
//! assert!(ExpertId::try_from(-1).is_err());
//! # Ok::<(), std::num::TryFromIntError>(())
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::cast_possible_truncation)]
#![warn(missing_docs)]

use std::fmt;
use std::num::{ParseIntError, TryFromIntError};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Exclusive upper limit of layer and expert ids. A file with an id at or above this limit is damaged.
pub const MAX_ID: u32 = 4096;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($number:ty) from $($other:ty),+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $number);

        impl $name {
            /// Returns the id as an index into a list with one element per id.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = ParseIntError;

            fn from_str(text: &str) -> Result<Self, ParseIntError> {
                text.parse().map(Self)
            }
        }

        $(impl TryFrom<$other> for $name {
            type Error = TryFromIntError;

            fn try_from(number: $other) -> Result<Self, TryFromIntError> {
                number.try_into().map(Self)
            }
        })+
    };
}

id! {
    /// A layer: the block number of its tensors in a GGUF file (`blk.N.`). Dense layers and the MTP head are counted, too.
    LayerId(u16) from u32, u64, usize, i32, i64
}

id! {
    /// An expert of a layer: the index of its router output.
    ExpertId(u32) from u64, usize, i32, i64
}

id! {
    /// A token: its position in its sequence, which starts at 0.
    TokenId(u32) from u64, usize, i32, i64
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
