//! Tensor types: ids, names, block sizes in elements and bytes.

use std::fmt;

use serde::{Serialize, Serializer};
use thiserror::Error;

/// Why the size of a tensor type is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TypeError {
    /// ggml has removed this type, so its size is not defined.
    #[error(
        "type {id} is {name}, which ggml has removed; convert the model again with a current llama.cpp"
    )]
    Removed {
        /// Id as in the file.
        id: u32,
        /// Its former name.
        name: &'static str,
    },
    /// ggml has removed this type, but ik_llama.cpp uses the id for a type of its own.
    #[error(
        "type {id} is {name} in ggml, which has removed it, and {ik} in ik_llama.cpp, whose size is not known; requantize the model"
    )]
    RemovedButIk {
        /// Id as in the file.
        id: u32,
        /// Its former name in ggml.
        name: &'static str,
        /// Its name in ik_llama.cpp.
        ik: &'static str,
    },
    /// A type of ik_llama.cpp whose size is not known.
    #[error(
        "type {id} is {name} of ik_llama.cpp, which is not intended for files and whose size is not known; requantize the model"
    )]
    Unsized {
        /// Id as in the file.
        id: u32,
        /// Its name.
        name: &'static str,
    },
    /// The id is unknown.
    #[error(
        "type {id} is unknown (types of ggml are 0..=42, of ik_llama.cpp 97..=399); download the file again, or use a newer version of this software"
    )]
    Unknown {
        /// Id as in the file.
        id: u32,
    },
}

/// Defines `GgmlType`, its methods, and assertions that the bytes of a block are the sum of its fields.
macro_rules! ggml_types {
    ($($name:ident = $id:literal, $block:literal / $bytes:literal = $($field:literal)*
        $(, row $row_meta:literal)?;)*) => {
        /// A tensor type of ggml or ik_llama.cpp. The discriminant is the id in GGUF files.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        #[allow(non_camel_case_types)] // The names of ggml.
        #[repr(u32)]
        pub enum GgmlType {
            $(#[doc = concat!("`", stringify!($name), "`: ", stringify!($bytes), " bytes for ",
                stringify!($block), " elements", $("; every row starts with ", stringify!($row_meta),
                " bytes of row metadata",)? ".")]
            $name = $id,)*
        }

        $(const _: () = assert!($bytes == 0 $(+ $field)*);)*

        impl GgmlType {
            /// All types, ordered by id.
            pub const ALL: &[GgmlType] = &[$(GgmlType::$name),*];

            /// The name in ggml, for example `Q4_K`.
            pub const fn name(self) -> &'static str {
                match self { $(GgmlType::$name => stringify!($name),)* }
            }

            /// Number of elements of a block.
            pub const fn block_size(self) -> u64 {
                match self { $(GgmlType::$name => $block,)* }
            }

            /// Size of a block in bytes.
            pub const fn type_size(self) -> u64 {
                match self { $(GgmlType::$name => $bytes,)* }
            }

            /// Size in bytes of the metadata before the blocks of each row. It is 0 for all types of ggml; some types of ik_llama.cpp
    /// store a scale there.
            pub const fn row_meta_size(self) -> u64 {
                match self { $(GgmlType::$name => 0 $(+ $row_meta)?,)* }
            }

            const fn known(id: u32) -> Option<GgmlType> {
                match id { $($id => Some(GgmlType::$name),)* _ => None }
            }
        }
    };
}

// NAME = ID, ELEMENTS / BYTES of a block = bytes of its fields in the order of ggml's structs, row BYTES of row metadata.
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

    // Types of ik_llama.cpp. Most interleaved types (_R4, _R8, _R16) have the size of the type without the suffix.
    Q6_0       = 133,  32 /  26 = 2 8 16;
    IQ1_BN     = 134,  64 /  13 = 12 1, row 2;
    IQ2_BN     = 135,  64 /  16 = 16, row 4;
    IQ2_K      = 137, 256 /  76 = 2 2 8 64;
    IQ3_K      = 138, 256 / 110 = 2 2 2 8 64 32;
    IQ4_K      = 139, 256 / 144 = 2 2 4 8 128;
    IQ5_K      = 140, 256 / 176 = 2 2 4 8 128 32;
    IQ6_K      = 141, 256 / 212 = 2 2 16 128 64;
    IQ4_KS     = 144, 256 / 136 = 8 128, row 4;
    IQ2_KS     = 145, 256 /  70 = 2 4 64, row 2;
    IQ4_KSS    = 146, 256 / 128 = 128, row 4;
    Q8_KV      = 151,  32 /  32 = 32, row 8;
    IQ5_KS     = 152, 256 / 168 = 8 128 32, row 4;
    IQ2_KT     = 153, 256 /  68 = 4 64, row 4;
    IQ3_KT     = 154, 256 / 100 = 4 64 32, row 4;
    IQ4_KT     = 155, 256 / 128 = 128, row 4;
    IQ3_KS     = 156, 256 / 102 = 2 4 64 32, row 2;
    IQ2_KL     = 157, 256 /  86 = 2 4 64 16, row 2;
    IQ1_KT     = 158, 256 /  56 = 8 32 16, row 4;
    Q4_0_R8    = 202,  32 /  18 = 2 16;
    Q5_0_R4    = 206,  32 /  22 = 2 4 16;
    Q8_0_R8    = 208,  32 /  34 = 2 32;
    Q2_K_R4    = 210, 256 /  84 = 16 64 2 2;
    Q3_K_R4    = 211, 256 / 110 = 32 64 12 2;
    Q4_K_R4    = 212, 256 / 144 = 2 2 12 128;
    Q5_K_R4    = 213, 256 / 176 = 2 2 12 32 128;
    Q6_K_R4    = 214, 256 / 210 = 128 64 16 2;
    IQ2_XXS_R4 = 216, 256 /  66 = 2 64;
    IQ2_XS_R4  = 217, 256 /  74 = 2 64 8;
    IQ3_XXS_R4 = 218, 256 /  98 = 2 96;
    IQ1_S_R4   = 219,  32 /   6 = 4 2, row 2;
    IQ4_NL_R4  = 220,  32 /  18 = 2 16;
    IQ3_S_R4   = 221, 256 / 110 = 2 64 8 32 4;
    IQ2_S_R4   = 222, 256 /  82 = 2 64 8 8;
    IQ4_XS_R8  = 223, 256 / 136 = 2 2 4 128;
    IQ1_M_R4   = 229,  32 /   7 = 4 2 1, row 2;
    BF16_R16   = 230,   1 /   2 = 2;
    Q6_0_R4    = 233,  32 /  26 = 2 8 16;
    IQ2_BN_R4  = 335,  64 /  16 = 16, row 4;
    IQ2_K_R4   = 337, 256 /  76 = 2 2 8 64;
    IQ3_K_R4   = 338, 256 / 110 = 2 2 2 8 64 32;
    IQ4_K_R4   = 339, 256 / 144 = 2 2 4 8 128;
    IQ5_K_R4   = 340, 256 / 176 = 2 2 4 8 128 32;
    IQ4_KS_R4  = 344, 256 / 136 = 8 128, row 4;
    IQ5_KS_R4  = 352, 256 / 168 = 8 128 32, row 4;
    Q8_KV_R8   = 398,  32 /  32 = 32, row 4;
    Q8_K_R8    = 399, 256 / 258 = 2 256;
}

/// Smallest id of ik_llama.cpp's own types. The largest id of ggml is 42.
const FIRST_IK: u32 = 97;

/// Types that ggml has removed: id, former name, and the name of the type with this id in ik_llama.cpp.
const REMOVED: &[(u32, &str, Option<&str>)] = &[
    (4, "Q4_2", None),
    (5, "Q4_3", None),
    (31, "Q4_0_4_4", Some("Q4_0_4_4")),
    (32, "Q4_0_4_8", Some("Q4_0_4_8")),
    (33, "Q4_0_8_8", Some("Q4_0_8_8")),
    (36, "IQ4_NL_4_4", Some("I2_S")),
    (37, "IQ4_NL_4_8", None),
    (38, "IQ4_NL_8_8", None),
];

/// Types of ik_llama.cpp with an unknown row size. Most are used only for activations; the last two are removed.
const IK_UNSIZED: &[(u32, &str)] = &[
    (97, "Q8_0_X4"),
    (98, "Q8_1_X4"),
    (99, "Q8_2_X4"),
    (136, "Q8_K64"),
    (147, "Q8_K16"),
    (148, "Q8_K32"),
    (149, "Q8_KR8"),
    (150, "Q8_K128"),
    (397, "Q8_K_R16"),
    (142, "IQ2_TN"),
    (143, "IQ1_TN"),
];

impl GgmlType {
    /// Returns the type with this id in GGUF files.
    ///
    /// # Errors
    /// The id is unknown, or the type was removed from ggml. There is no fallback: a guessed size would be wrong.
    pub fn from_id(id: u32) -> Result<GgmlType, TypeError> {
        if let Some(ty) = Self::known(id) {
            return Ok(ty);
        }
        if let Some(&(id, name, ik)) = REMOVED.iter().find(|removed| removed.0 == id) {
            return Err(match ik {
                Some(ik) => TypeError::RemovedButIk { id, name, ik },
                None => TypeError::Removed { id, name },
            });
        }
        match IK_UNSIZED.iter().find(|unsized_| unsized_.0 == id) {
            Some(&(id, name)) => Err(TypeError::Unsized { id, name }),
            None => Err(TypeError::Unknown { id }),
        }
    }

    /// Whether the type belongs to ik_llama.cpp. llama.cpp does not load it.
    pub const fn is_ik(self) -> bool {
        self.id() >= FIRST_IK
    }

    /// The id in GGUF files.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// Returns the size in bytes of a row of `ne0` elements (`ggml_row_size`).
    ///
    /// `None` if `ne0` is not a multiple of the block size, or if the size does not fit 64 bits. The size of a tensor is a multiple
    /// of its row size; it cannot be computed from the number of elements, because rows may have metadata.
    pub const fn row_size(self, ne0: u64) -> Option<u64> {
        if !ne0.is_multiple_of(self.block_size()) {
            return None;
        }
        match (ne0 / self.block_size()).checked_mul(self.type_size()) {
            Some(blocks) => blocks.checked_add(self.row_meta_size()),
            None => None,
        }
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
