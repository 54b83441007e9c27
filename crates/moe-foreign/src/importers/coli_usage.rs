//! colibri's `.coli_usage`: lines `layer expert count`, zeros left out.
//!
//! Lines with a negative layer are headers: `-1 n_layers n_experts`, `-2 version engine_id`; older files have none, and then
//! nothing else tells the format from other numbers, so each line must have three of them. With a header, further numbers of a
//! line are ignored. Layer `n_layers` is the multi-token predictor's and is left out, as are further ones of the model's MTP head.

use moe_gguf::text::counted;
use moe_trace::{CountRow, ExpertId, Facts};

use crate::source::{Lines, sample_lines};
use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

use super::text::{TextFault, are_integers, number};

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
        let Some(first) = sample_lines(sample).next() else {
            return false;
        };
        let has_header = is_header(first);
        sample_lines(sample).all(|line| {
            let n = line.split_ascii_whitespace().count();
            (n == 3 || n > 3 && has_header) && are_integers(line.split_ascii_whitespace())
        })
    }

    fn import(
        &self,
        source: &Source,
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        let model = options.model.as_ref();
        let mut n_layer = model
            .filter(|model| model.n_nextn_layer > 0)
            .and_then(Facts::n_hidden_layer);
        let n_nextn = model.map_or(0, |model| model.n_nextn_layer).max(1);
        let mut left_out = 0u64;
        for file in source.files() {
            output.begin_file(file);
            let mut lines = Lines::open(file)?;
            let mut has_header = false;
            while let Some((line, text)) = lines.next_line()? {
                let at = || At::Line(line);
                has_header |= is_header(text);
                let [layer, second, third] = match parse(text) {
                    Ok((numbers, false)) => numbers,
                    Ok((numbers, true)) if has_header => {
                        output.note("ignored numbers after the third of a line");
                        numbers
                    }
                    Ok(_) => return Err(lines.invalid(TextFault::TooMany(3))),
                    Err(fault) => {
                        lines.cut_or(lines.invalid(fault), output)?;
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
                            "format version {second} is not supported ({VERSION} is); read it with a newer moe-analyze"
                        );
                        return Err(output.invalid(at(), reason));
                    }
                    ..0 => {}
                    _ if n_layer.is_some_and(|n| is_mtp(layer, n, n_nextn)) => left_out += 1,
                    _ => {
                        let row = CountRow {
                            layer_id: output.layer_id(at, layer as u64)?,
                            expert_id: ExpertId(to_u32("expert", second, output)?),
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
        output.note("counts alone: order, tokens, phases and weights are unknown");
        Ok(())
    }
}

/// Whether a layer is one of the `n_nextn` of the multi-token predictor, which follow `n_layer` others.
fn is_mtp(layer: i64, n_layer: u32, n_nextn: u32) -> bool {
    let n_layer = i64::from(n_layer);
    (n_layer..n_layer + i64::from(n_nextn)).contains(&layer)
}

/// Whether a line is a header of the format, not a count.
fn is_header(line: &str) -> bool {
    let mut words = line.split_ascii_whitespace();
    matches!(words.next(), Some("-1" | "-2"))
}

/// The first three numbers of a line, and whether there are more.
fn parse(text: &str) -> Result<([i64; 3], bool), TextFault> {
    let mut words = text.split_ascii_whitespace();
    let mut next = |name| number(name, words.next().ok_or(TextFault::Missing(name))?);
    let numbers = [next("layer")?, next("expert")?, next("count")?];
    Ok((numbers, words.next().is_some()))
}
