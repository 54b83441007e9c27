//! Usage history of [colibri](https://github.com/JustVugg/colibri), `.coli_usage`: expert counts as text.
//!
//! ```text
//! -1 n_layers n_experts
//! -2 version engine_id
//! layer expert count
//! ```
//!
//! `count` is the number of tokens that selected the expert; counts of 0 are omitted. Older files have no headers. Without a header each
//! line must have exactly three integers, because nothing else identifies the format; with one, further numbers in a line are
//! ignored. Layer `n_layers` and the following layers of the MTP head are skipped. Compared with our records, the format lacks
//! tokens, order, phases and router weights.
//!
//! Definition: `c/route_trace.h` in that repository.

use moe_files::text::counted;
use moe_trace::{CountRow, ExpertId, ModelInfo};

use crate::source::{Lines, sample_lines};
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

use super::shared::text::{LineError, are_integers, number};

/// The supported version of the format.
const VERSION: i64 = 1;

/// Importer of `.coli_usage`.
pub struct ColiUsage;

impl Importer for ColiUsage {
    fn name(&self) -> &'static str {
        "coli-usage"
    }

    fn description(&self) -> &'static str {
        "usage history of colibri (.coli_usage), lines of layer, expert and count: counts"
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
            .and_then(ModelInfo::n_hidden_layer);
        let n_nextn = model.map_or(0, |model| model.n_nextn_layer).max(1);
        let mut n_skipped = 0u64;
        for file in source.files() {
            output.begin_file(file);
            let mut lines = Lines::open(file)?;
            let mut has_header = false;
            while let Some((line, text)) = lines.next_line()? {
                let at = || Location::Line(line);
                has_header |= is_header(text);
                let [layer, second, third] = match parse(text) {
                    Ok((numbers, false)) => numbers,
                    Ok((numbers, true)) if has_header => {
                        output.note("ignored numbers after the third number of a line");
                        numbers
                    }
                    Ok(_) => return Err(lines.invalid(LineError::TooMany(3))),
                    Err(error) => {
                        lines.skip_truncated(lines.invalid(error), output)?;
                        continue;
                    }
                };
                let to_u32 = |name: &'static str, number: i64, output: &Output<'_>| {
                    u32::try_from(number).map_err(|_| {
                        let shown = number.to_string();
                        let problem = "out of the range of this field";
                        let error = LineError::Number {
                            name,
                            shown,
                            problem,
                        };
                        output.invalid(at(), error)
                    })
                };
                match layer {
                    -1 => {
                        n_layer = Some(to_u32("number of layers", second, output)?);
                        output.model_info(&ModelInfo {
                            n_layer,
                            n_expert: Some(to_u32("number of experts", third, output)?),
                            ..ModelInfo::default()
                        })?;
                    }
                    -2 if second > VERSION => {
                        return Err(output.version(at(), second, "1"));
                    }
                    ..0 => {}
                    _ if n_layer.is_some_and(|n| is_mtp(layer, n, n_nextn)) => n_skipped += 1,
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
        if n_skipped > 0 {
            output.note(format!(
                "skipped {} of layers of the MTP head",
                counted(n_skipped, "count")
            ));
        }
        output.note("the format contains counts without tokens, order, phases and router weights");
        Ok(())
    }
}

/// Whether a layer is one of the `n_nextn` layers of the MTP head, which follow the `n_layer` hidden layers.
fn is_mtp(layer: i64, n_layer: u32, n_nextn: u32) -> bool {
    let n_layer = i64::from(n_layer);
    (n_layer..n_layer + i64::from(n_nextn)).contains(&layer)
}

/// Whether a line is a header.
fn is_header(line: &str) -> bool {
    let mut words = line.split_ascii_whitespace();
    matches!(words.next(), Some("-1" | "-2"))
}

/// The first three numbers of a line, and whether more follow.
fn parse(text: &str) -> Result<([i64; 3], bool), LineError> {
    let mut words = text.split_ascii_whitespace();
    let mut next = |name| number(name, words.next().ok_or(LineError::Missing(name))?);
    let numbers = [next("layer")?, next("expert")?, next("count")?];
    Ok((numbers, words.next().is_some()))
}
