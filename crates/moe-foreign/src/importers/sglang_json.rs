//! What SGLang and ktransformers take as `--init-expert-location` in JSON: counts of experts.
//!
//! `{"logical_count": [[...]]}`, `[layers, experts]` or `[steps, layers, experts]`; or `physical_to_logical_map`,
//! `[layers, physical]`, with `global_physical_count` of the same shape. A map alone is a placement.

use moe_gguf::text::counted;
use serde::Deserialize;

use crate::arrays::{CountSums, PhysicalMap, element, element_of};
use crate::binary::array::Array;
use crate::binary::nested::Nested;
use crate::{At, ForeignError, ImportOptions, Importer, Output, Source, json};

/// `logical_count` JSON.
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
        "expert counts of SGLang and ktransformers in JSON (logical_count)"
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
    array.map_err(|error| output.invalid(At::Element(key.to_owned()), error))
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
            let map = array("physical_to_logical_map", map, output)?;
            let map =
                PhysicalMap::new(map).map_err(|reason| output.invalid(element(&[]), reason))?;
            let counts = array("global_physical_count", counts, output)?;
            ("global_physical_count", counts, Some(map))
        }
        _ => {
            return Err(output.invalid(
                At::Element("physical_to_logical_map".into()),
                "a placement without counts: it does not tell how hot an expert is; give a file with logical_count",
            ));
        }
    };
    note_steps(&counts, output);
    let mut sums = CountSums::default();
    sums.add(&counts, map.as_ref())
        .map_err(|(index, reason)| output.invalid(element_of(key, &index), reason))?;
    sums.finish(options, output)
}

/// Tells that the order of steps is lost.
pub(super) fn note_steps(counts: &Array<'_>, output: &mut Output<'_>) {
    if let &[n_steps, _, _] = counts.shape() {
        output.note(format!(
            "the counts of {} were summed",
            counted(n_steps, "step")
        ));
    }
}
