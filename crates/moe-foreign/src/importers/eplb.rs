//! The `weight` matrix of DeepSeek's [EPLB](https://github.com/deepseek-ai/EPLB) as JSON: expert counts.
//!
//! ```text
//! [[90, 132], [20, 107]]
//! ```
//!
//! The shape is `[layers, experts]`; the numbers are tokens per expert. Deeper lists are rejected, because routing and counts look
//! the same. Compared with our records, the format lacks tokens, order, phases and router weights.
//!
//! Definition: the argument `weight` of `rebalance_experts` in `eplb.py`, written with `json.dump`.

use crate::arrays::{CountError, CountSums, element, warn_if_routing};
use crate::binary::nested::Nested;
use crate::{ForeignError, ImportOptions, Importer, Output, Source, json};

/// Importer of the matrix.
pub struct Eplb;

impl Importer for Eplb {
    fn name(&self) -> &'static str {
        "eplb"
    }

    fn description(&self) -> &'static str {
        "JSON matrix of EPLB, [layers, experts]: counts"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        let inner = |bytes: &[u8]| {
            bytes
                .strip_prefix(b"[")
                .map(|rest| rest.trim_ascii_start().to_vec())
        };
        let first = inner(sample.trim_ascii_start()).and_then(|rest| inner(&rest));
        first.is_some_and(|rest| matches!(rest.first(), Some(b'0'..=b'9' | b'[')))
    }

    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            let matrix: Nested = json::document(file)?;
            let counts = matrix
                .array()
                .map_err(|error| output.invalid(element(&[]), error))?;
            if counts.shape().len() > 2 {
                return Err(output.invalid(element(&[]), CountError::Ambiguous));
            }
            warn_if_routing(&counts, options, output);
            let mut sums = CountSums::default();
            sums.add(&counts, None)
                .map_err(|(index, error)| output.invalid(element(&index), error))?;
            sums.finish(options, output)?;
        }
        Ok(())
    }
}
