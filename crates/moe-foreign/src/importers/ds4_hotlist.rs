//! The hot list of ds4: `layer expert hits weight`, hottest first, after comments about the model.
//!
//! Writers differ in what `weight` is (a sum of router weights, or the share of the hits), so it is left out.

use moe_trace::{CountRow, Facts};

use crate::source::Lines;
use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

use super::text::{TextFault, number};

const MAGIC: &str = "# ds4 expert hotlist v";
const VERSION: &str = "1";

/// ds4's hot list.
pub struct Ds4Hotlist;

impl Importer for Ds4Hotlist {
    fn name(&self) -> &'static str {
        "ds4-hotlist"
    }

    fn description(&self) -> &'static str {
        "expert hot list of ds4: layer, expert, hits, weight"
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
            "counts alone: order, tokens and phases are unknown; the weight column was left out, as its meaning differs \
             between writers",
        );
        Ok(())
    }
}

fn import_file(mut lines: Lines, output: &mut Output<'_>) -> Result<(), ForeignError> {
    let mut facts = Facts::default();
    while let Some((line, text)) = lines.next_line()? {
        let at = || At::Line(line);
        if let Some(version) = text.strip_prefix(MAGIC)
            && version != VERSION
        {
            let shown: String = version.chars().take(32).collect();
            let reason = format!("hot list version {shown:?} is not supported ({VERSION} is)");
            return Err(output.invalid(at(), reason));
        }
        if let Some(comment) = text.strip_prefix('#') {
            let is_fact = read_comment(comment.trim(), &mut facts);
            if is_fact.map_err(|fault| output.invalid(at(), fault))? {
                output.facts(&facts)?;
            }
        } else {
            match read_row(text) {
                Ok((row, has_more)) => {
                    if has_more {
                        output.note("ignored values after the fourth of a line");
                    }
                    output.count(at, &row)?;
                }
                Err(fault) => lines.cut_or(lines.invalid(fault), output)?,
            }
        }
    }
    Ok(())
}

/// Whether the comment says something about the model.
fn read_comment(comment: &str, facts: &mut Facts) -> Result<bool, TextFault> {
    match comment.split_once(' ') {
        Some(("model", name)) => facts.model = Some(name.to_owned()),
        Some(("layers", n)) => facts.n_layer = Some(number("layers", n)?),
        Some(("experts", n)) => facts.n_expert = Some(number("experts", n)?),
        _ => return Ok(false),
    }
    Ok(true)
}

/// A row, and whether it has values after the weight.
fn read_row(text: &str) -> Result<(CountRow, bool), TextFault> {
    let mut words = text.split_ascii_whitespace();
    let mut next = |name| words.next().ok_or(TextFault::Missing(name));
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
