//! colibri's `.coli_usage`: lines `layer expert count`, zeros left out.
//!
//! Lines with a negative layer are headers: `-1 n_layers n_experts`, `-2 version engine_id`; older files have none. Layer
//! `n_layers` is the multi-token predictor's and is left out.

use moe_gguf::text::counted;

use crate::foreign::{
    At, CountRow, Facts, ForeignError, Importer, Lines, Options, Output, Source, sample_lines,
};

use super::text::{are_integers, number};

/// The version of the format that is known.
const VERSION: i64 = 1;

/// colibri's usage history.
pub struct ColiUsage;

impl Importer for ColiUsage {
    fn name(&self) -> &'static str {
        "coli-usage"
    }

    fn description(&self) -> &'static str {
        ".coli_usage of colibri: counts, a line for each layer and expert"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        let is_triple = |line: &str| {
            line.split_ascii_whitespace().count() == 3
                && are_integers(line.split_ascii_whitespace())
        };
        sample_lines(sample).next().is_some() && sample_lines(sample).all(is_triple)
    }

    fn import(
        &self,
        source: &Source,
        _options: &Options,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        let mut n_layer = None;
        let mut left_out = 0u64;
        for file in source.files() {
            output.begin_file(file);
            let mut lines = Lines::open(file)?;
            while let Some((line, text)) = lines.next_line()? {
                let at = || At::Line(line);
                let [layer, second, third] = match parse(text) {
                    Ok(numbers) => numbers,
                    Err(reason) => {
                        lines.cut_or(lines.invalid(reason), output)?;
                        continue;
                    }
                };
                let to_u32 = |what: &str, number: i64, output: &Output<'_>| {
                    u32::try_from(number).map_err(|_| {
                        output.invalid(
                            at(),
                            format!("{what} {number} is out of range; the line is damaged"),
                        )
                    })
                };
                match layer {
                    -1 => {
                        n_layer = Some(to_u32("number of layers", second, output)?);
                        output.facts(&Facts {
                            n_layer,
                            n_expert: Some(to_u32("number of experts", third, output)?),
                            ..Facts::default()
                        })?;
                    }
                    -2 if second > VERSION => {
                        let reason = format!(
                            "format version {second} is not known, {VERSION} is read; read it with a newer moe-analyze"
                        );
                        return Err(output.invalid(at(), reason));
                    }
                    ..0 => {}
                    _ if n_layer == u32::try_from(layer).ok() => left_out += 1,
                    _ => {
                        let row = CountRow {
                            layer_id: output.id(at, "layer", layer as u64)?,
                            expert_id: to_u32("expert", second, output)?,
                            phase: None,
                            count: u64::from(to_u32("count", third, output)?),
                            mass: None,
                        };
                        output.count(at, &row)?;
                    }
                }
            }
        }
        if left_out > 0 {
            output.note(format!(
                "left out: {} of the multi-token predictor's layer",
                counted(left_out, "count")
            ));
        }
        output.note("counts alone: order, tokens, phases and weights are not told");
        Ok(())
    }
}

fn parse(text: &str) -> Result<[i64; 3], String> {
    let mut words = text.split_ascii_whitespace();
    let mut next = |name: &str| {
        let word = words
            .next()
            .ok_or(format!("no {name}; the line is damaged"))?;
        number(name, word)
    };
    let numbers = [next("layer")?, next("expert")?, next("count")?];
    match words.next() {
        None => Ok(numbers),
        Some(_) => Err("more than three numbers; the line is damaged".into()),
    }
}
