//! Hot list of [ds4](https://github.com/antirez/ds4): expert counts, hottest first.
//!
//! ```text
//! # ds4 expert hotlist v1
//! # model NAME
//! # layers 2
//! # experts 8
//! # columns: layer expert hits weight
//! 0 5 4 2.750000
//! ```
//!
//! `hits` is the number of tokens that selected the expert. `weight` is ignored: ds4 writes the sum of the router weights, a fork of
//! llama.cpp the fraction of all hits. Compared with our records, the format lacks tokens, order and phases.
//!
//! Definition: `ds4_expert_profile_write_hotlist_file` in `ds4.c` of that repository.

use moe_trace::{CountRow, ModelInfo};

use crate::source::Lines;
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

use super::shared::text::{LineError, number, shown};

const MAGIC: &str = "# ds4 expert hotlist v";
const VERSION: &str = "1";

/// Importer of hot lists.
pub struct Ds4Hotlist;

impl Importer for Ds4Hotlist {
    fn name(&self) -> &'static str {
        "ds4-hotlist"
    }

    fn description(&self) -> &'static str {
        "hot list of ds4, lines of layer, expert, hits and weight: counts"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        sample.starts_with(MAGIC.as_bytes())
    }

    fn import(
        &self,
        source: &Source,
        _options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            import_file(Lines::open(file)?, output)?;
        }
        output.note(
            "the format contains counts without tokens, order and phases; the weight column is ignored, because its meaning \
             differs between tools",
        );
        Ok(())
    }
}

fn import_file(mut lines: Lines, output: &mut Output<'_>) -> Result<(), ForeignError> {
    let mut model_info = ModelInfo::default();
    while let Some((line, text)) = lines.next_line()? {
        let at = || Location::Line(line);
        if let Some(version) = text.strip_prefix(MAGIC)
            && version != VERSION
        {
            return Err(output.version(at(), shown(version), VERSION));
        }
        if let Some(comment) = text.strip_prefix('#') {
            let is_model_info = read_comment(comment.trim(), &mut model_info);
            if is_model_info.map_err(|error| output.invalid(at(), error))? {
                output.model_info(&model_info)?;
            }
        } else {
            match read_row(text) {
                Ok((row, has_more)) => {
                    if has_more {
                        output.note("ignored values after the fourth value of a line");
                    }
                    output.count(at, &row)?;
                }
                Err(error) => lines.skip_truncated(lines.invalid(error), output)?,
            }
        }
    }
    Ok(())
}

/// Adds the fact about the model in a comment; returns whether there is one.
fn read_comment(comment: &str, model_info: &mut ModelInfo) -> Result<bool, LineError> {
    match comment.split_once(' ') {
        Some(("model", name)) => model_info.model = Some(name.to_owned()),
        Some(("layers", n)) => model_info.n_layer = Some(number("layers", n)?),
        Some(("experts", n)) => model_info.n_expert = Some(number("experts", n)?),
        _ => return Ok(false),
    }
    Ok(true)
}

/// The count in a line, and whether values follow the weight.
fn read_row(text: &str) -> Result<(CountRow, bool), LineError> {
    let mut words = text.split_ascii_whitespace();
    let mut next = |name| words.next().ok_or(LineError::Missing(name));
    let row = CountRow {
        layer_id: number("layer", next("layer")?)?,
        expert_id: number("expert", next("expert")?)?,
        phase: None,
        count: number("hits", next("hits")?)?,
        mass: None,
    };
    number::<f64>("weight", next("weight")?)?;
    Ok((row, words.next().is_some()))
}
