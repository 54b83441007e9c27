//! Arrays of [NumPy](https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html) (`.npy`): routing or counts.
//!
//! | elements | shape | content |
//! |---|---|---|
//! | integers | `[tokens, layers, top_k]` | expert ids (negative: empty slot), as [vLLM](https://github.com/vllm-project/vllm) returns them |
//! | integers, or floats with integer values | `[layers, experts]` | tokens per expert |
//! | floats with integer values | `[sequences, layers, experts]` | tokens per expert, as [MoE-Infinity](https://github.com/EfficientMoE/MoE-Infinity) traces them |
//!
//! Rows of layers are mapped to blocks by [`crate::layers`]. Both byte orders, C order and Fortran order are read. Compared with our
//! records, the format lacks sequences, phases, router weights, timestamps and lanes.

use crate::arrays::{CountSums, Tokens, element, import_tokens, warn_if_routing};
use crate::binary::mapped::Mapped;
use crate::binary::npy;
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

/// Importer of `.npy` files.
pub struct Npy;

impl Importer for Npy {
    fn name(&self) -> &'static str {
        "npy"
    }

    fn description(&self) -> &'static str {
        "NumPy array: routing [tokens, layers, top_k] as of vLLM, or counts [layers, experts]"
    }

    fn is_binary(&self) -> bool {
        true
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        sample.starts_with(npy::MAGIC)
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
            let array = npy::read(&bytes)
                .map_err(|error| output.invalid(Location::Byte(error.offset), error.reason))?;
            if array.shape().len() == 3 && !array.element_type().is_float() {
                import_tokens(&array, Tokens::default(), element, options, output)?;
                output.note("phases and router weights are not recorded");
                continue;
            }
            warn_if_routing(&array, options, output);
            let mut sums = CountSums::default();
            sums.add(&array, None)
                .map_err(|(index, error)| output.invalid(element(&index), error))?;
            sums.finish(options, output)?;
        }
        Ok(())
    }
}
