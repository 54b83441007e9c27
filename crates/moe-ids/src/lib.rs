//! Identifiers of layers, experts and tokens. Model files, placements and traces share them, so they have a crate of their own.
//!
//! An identifier is a number without a sentinel: what belongs to no layer has no `LayerId`, that is `None`. Readers convert the
//! sentinels of file formats (-1, 65,535) once.
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

/// Layer and expert ids at or above this do not exist in any model: a file that contains one is damaged.
pub const MAX_ID: u32 = 4096;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($number:ty) from $($other:ty),+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $number);

        impl $name {
            /// The id as an index of a list with an element for each id.
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
    /// A layer: the block number of its tensors in a GGUF file (`blk.N.`), which counts dense layers and the MTP head, too.
    LayerId(u16) from u32, u64, usize, i32, i64
}

id! {
    /// An expert of a layer, in the order of the router's outputs.
    ExpertId(u32) from u64, usize, i32, i64
}

id! {
    /// A token: its position in its sequence.
    TokenId(u32) from u64, usize, i32, i64
}
