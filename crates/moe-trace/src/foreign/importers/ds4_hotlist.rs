//! The hot list of ds4: `layer expert hits weight`, hottest first, after comments about the model.
//!
//! Writers differ in what `weight` is (a sum of router weights, or the share of the hits), so it is left out.

use crate::foreign::{At, CountRow, Facts, ForeignError, Importer, Lines, Options, Output, Source};

use super::text::number;

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
        _options: &Options,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            import_file(Lines::open(file)?, output)?;
        }
        output.note(
            "counts alone: order, tokens and phases are not told; the weight column was left out, as its meaning differs \
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
            let reason = format!("hot list version {version:?} is not known, {VERSION} is read");
            return Err(output.invalid(at(), reason));
        }
        if let Some(comment) = text.strip_prefix('#') {
            let told = read_comment(comment.trim(), &mut facts);
            if told.map_err(|reason| output.invalid(at(), reason))? {
                output.facts(&facts)?;
            }
        } else {
            match read_row(text) {
                Ok(row) => output.count(at, &row)?,
                Err(reason) => lines.cut_or(lines.invalid(reason), output)?,
            }
        }
    }
    Ok(())
}

/// Whether the comment says something about the model.
fn read_comment(comment: &str, facts: &mut Facts) -> Result<bool, String> {
    match comment.split_once(' ') {
        Some(("model", name)) => facts.model = Some(name.to_owned()),
        Some(("layers", n)) => facts.n_layer = Some(number("layers", n)?),
        Some(("experts", n)) => facts.n_expert = Some(number("experts", n)?),
        _ => return Ok(false),
    }
    Ok(true)
}

fn read_row(text: &str) -> Result<CountRow, String> {
    let mut words = text.split_ascii_whitespace();
    let mut next = |name: &str| {
        words
            .next()
            .ok_or(format!("no {name}; the line is damaged"))
    };
    let row = CountRow {
        layer_id: number("layer", next("layer")?)?,
        expert_id: number("expert", next("expert")?)?,
        phase: None,
        count: number("hits", next("hits")?)?,
        mass: None,
    };
    number::<f64>("weight", next("weight")?)?;
    match words.next() {
        None => Ok(row),
        Some(_) => Err("more than four values; the line is damaged".into()),
    }
}
