//! Arrays of NumPy: routing as vLLM returns it, or counts.
//!
//! Integers `[tokens, layers, top_k]` are routing; integers or whole floats `[layers, experts]` are counts; floats
//! `[sequences, layers, experts]` are the counts of MoE-Infinity's expert tracer.

use crate::arrays::{CountSums, Tokens, element, tokens, warn_of_routing};
use crate::binary::mapped::Mapped;
use crate::binary::npy;
use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

/// `.npy`.
pub struct Npy;

impl Importer for Npy {
    fn name(&self) -> &'static str {
        "npy"
    }

    fn description(&self) -> &'static str {
        "array of NumPy: routing [tokens, layers, top_k] as of vLLM, or counts [layers, experts]"
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
                .map_err(|fault| output.invalid(At::Byte(fault.offset), fault.reason))?;
            if array.shape().len() == 3 && !array.element_type().is_float() {
                tokens(&array, Tokens::default(), element, options, output)?;
                output.note("the array tells neither phases nor router weights");
                continue;
            }
            warn_of_routing(&array, options, output);
            let mut sums = CountSums::default();
            sums.add(&array, None)
                .map_err(|(index, reason)| output.invalid(element(&index), reason))?;
            sums.finish(options, output)?;
        }
        Ok(())
    }
}
