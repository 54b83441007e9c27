//! Tensor types: the one table of ids, names, block sizes and bytes a block.

use std::fmt;

use serde::{Serialize, Serializer};
use thiserror::Error;

/// Why a tensor type id of a file cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TypeError {
    /// ggml had this type once and dropped it.
    #[error(
        "type {id} is {name}, which ggml has removed: convert the model again with a current llama.cpp"
    )]
    Removed {
        /// Id as in the file.
        id: u32,
        /// The name that the id had.
        name: &'static str,
    },
    /// No such type is known.
    #[error(
        "type {id} is not known (ggml's types are 0 to 42): its size cannot be told; the file is damaged or newer than this program"
    )]
    Unknown {
        /// Id as in the file.
        id: u32,
    },
}

/// Defines the enum, its look-ups and, for every row, an assertion that the bytes of a block are
/// the sum of the block's fields.
macro_rules! ggml_types {
    ($($name:ident = $id:literal, $block:literal / $bytes:literal = $($field:literal)*;)*) => {
        /// A tensor type of ggml. The discriminant is the id that a GGUF file stores.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        #[allow(non_camel_case_types)] // the names are ggml's
        #[repr(u32)]
        pub enum GgmlType {
            $(#[doc = concat!("`", stringify!($name), "`: ", stringify!($bytes), " bytes for ",
                stringify!($block), " elements.")]
            $name = $id,)*
        }

        $(const _: () = assert!($bytes == 0 $(+ $field)*);)*

        impl GgmlType {
            /// Every type that has a size, in the order of their ids.
            pub const ALL: &[GgmlType] = &[$(GgmlType::$name),*];

            /// The name as ggml spells it, `Q4_K`.
            pub const fn name(self) -> &'static str {
                match self { $(GgmlType::$name => stringify!($name),)* }
            }

            /// Elements in a block.
            pub const fn block_size(self) -> u64 {
                match self { $(GgmlType::$name => $block,)* }
            }

            /// Bytes of a block.
            pub const fn type_size(self) -> u64 {
                match self { $(GgmlType::$name => $bytes,)* }
            }

            const fn known(id: u32) -> Option<GgmlType> {
                match id { $($id => Some(GgmlType::$name),)* _ => None }
            }
        }
    };
}

// Name = id, elements / bytes of a block = bytes of its fields, in the order of ggml's structs.
ggml_types! {
    F32     =  0,   1 /   4 = 4;
    F16     =  1,   1 /   2 = 2;
    Q4_0    =  2,  32 /  18 = 2 16;
    Q4_1    =  3,  32 /  20 = 2 2 16;
    Q5_0    =  6,  32 /  22 = 2 4 16;
    Q5_1    =  7,  32 /  24 = 2 2 4 16;
    Q8_0    =  8,  32 /  34 = 2 32;
    Q8_1    =  9,  32 /  36 = 2 2 32;
    Q2_K    = 10, 256 /  84 = 16 64 2 2;
    Q3_K    = 11, 256 / 110 = 32 64 12 2;
    Q4_K    = 12, 256 / 144 = 2 2 12 128;
    Q5_K    = 13, 256 / 176 = 2 2 12 32 128;
    Q6_K    = 14, 256 / 210 = 128 64 16 2;
    Q8_K    = 15, 256 / 292 = 4 256 32;
    IQ2_XXS = 16, 256 /  66 = 2 64;
    IQ2_XS  = 17, 256 /  74 = 2 64 8;
    IQ3_XXS = 18, 256 /  98 = 2 96;
    IQ1_S   = 19, 256 /  50 = 2 32 16;
    IQ4_NL  = 20,  32 /  18 = 2 16;
    IQ3_S   = 21, 256 / 110 = 2 64 8 32 4;
    IQ2_S   = 22, 256 /  82 = 2 64 8 8;
    IQ4_XS  = 23, 256 / 136 = 2 2 4 128;
    I8      = 24,   1 /   1 = 1;
    I16     = 25,   1 /   2 = 2;
    I32     = 26,   1 /   4 = 4;
    I64     = 27,   1 /   8 = 8;
    F64     = 28,   1 /   8 = 8;
    IQ1_M   = 29, 256 /  56 = 32 16 8;
    BF16    = 30,   1 /   2 = 2;
    TQ1_0   = 34, 256 /  54 = 48 4 2;
    TQ2_0   = 35, 256 /  66 = 64 2;
    MXFP4   = 39,  32 /  17 = 1 16;
    NVFP4   = 40,  64 /  36 = 4 32;
    Q1_0    = 41, 128 /  18 = 2 16;
    Q2_0    = 42,  64 /  18 = 2 16;
}

/// Ids that ggml gave to a type once and refuses now.
const REMOVED: &[(u32, &str)] = &[
    (4, "Q4_2"),
    (5, "Q4_3"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
];

impl GgmlType {
    /// The type that a file means by `id`.
    ///
    /// # Errors
    /// The id is unknown, or belongs to a type that ggml removed. There is no fall-back: a guessed
    /// size would put every later tensor in the wrong place.
    pub fn from_id(id: u32) -> Result<GgmlType, TypeError> {
        if let Some(ty) = Self::known(id) {
            return Ok(ty);
        }
        match REMOVED.iter().find(|(removed, _)| *removed == id) {
            Some(&(id, name)) => Err(TypeError::Removed { id, name }),
            None => Err(TypeError::Unknown { id }),
        }
    }

    /// The id that a GGUF file stores.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// Bytes of a row of `ne0` elements; `None` where that is not a whole number of blocks, or does
    /// not fit 64 bits. ggml sizes a tensor by rows, never by its count of elements.
    pub const fn row_size(self, ne0: u64) -> Option<u64> {
        if !ne0.is_multiple_of(self.block_size()) {
            return None;
        }
        (ne0 / self.block_size()).checked_mul(self.type_size())
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for GgmlType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}
