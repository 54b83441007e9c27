//! The binary usage file of colibri's inkling engine: magic `IKU1`, layers, experts, then a 32-bit count for each.

use crate::arrays::{CountSums, element};
use crate::binary::array::{Array, ElementType};
use crate::binary::mapped::Mapped;
use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

const MAGIC: &[u8] = b"IKU1";
const HEADER: usize = 12;

/// Usage file `IKU1`.
pub struct Iku1;

impl Importer for Iku1 {
    fn name(&self) -> &'static str {
        "iku1"
    }

    fn description(&self) -> &'static str {
        "binary usage file of colibri (IKU1): a count for each expert"
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
                return Err(output.invalid(At::Byte(4), "the header is cut off"));
            };
            let size = |at: usize| {
                header[at..]
                    .first_chunk()
                    .map_or(0, |&n| u32::from_le_bytes(n) as usize)
            };
            let shape = vec![size(4), size(8)];
            let counts = Array::contiguous(counts, ElementType::U32, false, shape, false)
                .map_err(|reason| format!("{reason}; the file is damaged or cut off"))
                .map_err(|reason| output.invalid(At::Byte(4), reason))?;
            let mut sums = CountSums::default();
            sums.add(&counts, None)
                .map_err(|(index, reason)| output.invalid(element(&index), reason))?;
            sums.finish(options, output)?;
        }
        Ok(())
    }
}
