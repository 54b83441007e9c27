//! The matrix that DeepSeek's EPLB balances: counts `[layers, experts]` as JSON, `[[90, 132], [20, 107]]`.

use crate::arrays::{CountSums, element, warn_of_routing};
use crate::binary::nested::Nested;
use crate::{ForeignError, ImportOptions, Importer, Output, Source, json};

/// Matrix of counts.
pub struct Eplb;

impl Importer for Eplb {
    fn name(&self) -> &'static str {
        "eplb"
    }

    fn description(&self) -> &'static str {
        "matrix of counts, layers × experts, as EPLB balances it (JSON)"
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
                let reason = "lists in lists of lists are routing [tokens, layers, top_k] or counts [steps, layers, experts], and nothing shows which; \
                              give the sum of the steps, counts as logical_count, or routing as an array of NumPy";
                return Err(output.invalid(element(&[]), reason));
            }
            warn_of_routing(&counts, options, output);
            let mut sums = CountSums::default();
            sums.add(&counts, None)
                .map_err(|(index, reason)| output.invalid(element(&index), reason))?;
            sums.finish(options, output)?;
        }
        Ok(())
    }
}
