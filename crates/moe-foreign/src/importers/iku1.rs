//! Binary usage file that [colibri](https://github.com/JustVugg/colibri) writes for models of its engine `inkling`: expert counts.
//!
//! | bytes | content (little-endian) |
//! |---|---|
//! | 0..4 | magic `IKU1` |
//! | 4..8 | number of layers, u32 |
//! | 8..12 | experts per layer, u32 |
//! | 12.. | tokens per expert, u32 `[layers, experts]` |
//!
//! Compared with our records, the format lacks tokens, order, phases and router weights.
//!
//! Definition: `usage_save` in `c/inkling.c` of that repository.

use crate::arrays::{CountSums, element};
use crate::binary::array::{Array, ElementType};
use crate::binary::mapped::Mapped;
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

const MAGIC: &[u8] = b"IKU1";
/// Size of the header in bytes.
const HEADER: usize = 12;

/// Importer of `IKU1` files.
pub struct Iku1;

impl Importer for Iku1 {
    fn name(&self) -> &'static str {
        "iku1"
    }

    fn description(&self) -> &'static str {
        "binary usage file of colibri (IKU1): counts"
    }

    fn is_binary(&self) -> bool {
        true
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        sample.starts_with(MAGIC)
    }

    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            let bytes = Mapped::open(file)?;
            let Some((header, counts)) = bytes.split_first_chunk::<HEADER>() else {
                let reason = "the header of 12 bytes is truncated; copy the file again";
                return Err(output.invalid(Location::Byte(4), reason));
            };
            let size = |at: usize| {
                header[at..]
                    .first_chunk()
                    .map_or(0, |&n| u32::from_le_bytes(n) as usize)
            };
            let shape = vec![size(4), size(8)];
            let counts = Array::contiguous(counts, ElementType::U32, false, shape, false)
                .map_err(|error| format!("{error}; the file is damaged or truncated"))
                .map_err(|reason| output.invalid(Location::Byte(4), reason))?;
            let mut sums = CountSums::default();
            sums.add(&counts, None)
                .map_err(|(index, error)| output.invalid(element(&index), error))?;
            sums.finish(options, output)?;
        }
        Ok(())
    }
}
