//! JSON files for `--init-expert-location` of [SGLang](https://github.com/sgl-project/sglang) and
//! [ktransformers](https://github.com/kvcache-ai/ktransformers): expert counts.
//!
//! One of:
//! - `{"logical_count": C}`, where C is `[layers, experts]` or `[steps, layers, experts]`;
//! - `{"global_physical_count": C, "physical_to_logical_map": M}`, both `[layers, physical experts]`.
//!
//! A map without counts is a placement and is rejected. Counts are tokens per expert. Compared with our records, the format lacks
//! tokens, order, phases and router weights; the importer sums the steps.
//!
//! Definition: `python/sglang/srt/eplb/expert_location.py`.

use moe_files::text::counted;
use serde::Deserialize;

use crate::arrays::{CountError, CountSums, PhysicalMap, element_of};
use crate::binary::array::Array;
use crate::binary::nested::Nested;
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source, json};

/// Importer of `logical_count` JSON.
pub struct SglangJson;

#[derive(Deserialize)]
struct Document {
    logical_count: Option<Nested>,
    global_physical_count: Option<Nested>,
    #[serde(alias = "last_physical_to_logical_map")]
    physical_to_logical_map: Option<Nested>,
}

impl Importer for SglangJson {
    fn name(&self) -> &'static str {
        "sglang"
    }

    fn description(&self) -> &'static str {
        "JSON for --init-expert-location of SGLang and ktransformers (logical_count): counts"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        let has = |key: &[u8]| sample.windows(key.len()).any(|bytes| bytes == key);
        sample.trim_ascii_start().starts_with(b"{")
            && (has(b"\"logical_count\"") || has(b"physical_to_logical_map\""))
    }

    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            import_document(&json::document(file)?, options, output)?;
        }
        Ok(())
    }
}

fn array<'a>(
    key: &str,
    numbers: &'a Nested,
    output: &Output<'_>,
) -> Result<Array<'a>, ForeignError> {
    let array = numbers.array();
    array.map_err(|error| output.invalid(Location::Element(key.to_owned()), error))
}

fn import_document(
    document: &Document,
    options: &ImportOptions,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let (key, counts, map): (_, Array<'_>, _) = match document {
        Document {
            logical_count: Some(counts),
            ..
        } => (
            "logical_count",
            array("logical_count", counts, output)?,
            None,
        ),
        Document {
            global_physical_count: Some(counts),
            physical_to_logical_map: Some(map),
            ..
        } => {
            let key = "physical_to_logical_map";
            let map = PhysicalMap::new(array(key, map, output)?)
                .map_err(|error| output.invalid(element_of(key, &[]), error))?;
            let counts = array("global_physical_count", counts, output)?;
            ("global_physical_count", counts, Some(map))
        }
        _ => {
            let at = Location::Element("physical_to_logical_map".into());
            return Err(output.invalid(at, CountError::NoCounts));
        }
    };
    note_steps(&counts, output);
    let mut sums = CountSums::default();
    sums.add(&counts, map.as_ref())
        .map_err(|(index, error)| output.invalid(element_of(key, &index), error))?;
    sums.finish(options, output)
}

/// Notes that the counts of several steps are summed.
pub(super) fn note_steps(counts: &Array<'_>, output: &mut Output<'_>) {
    if let &[n_steps, _, _] = counts.shape() {
        output.note(format!(
            "the counts of {} are summed",
            counted(n_steps, "step")
        ));
    }
}
