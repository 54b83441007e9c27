//! colibri's ROUTE_TRACE: a line for each call and row, `call row layer id:gate id:gate ...`.
//!
//! `call` counts the calls of layers, not the passes through the model, and `row` the tokens of a batch.

use moe_trace::{LayerId, RoutingRow};

use crate::passes::Passes;
use crate::source::{Lines, sample_lines};
use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

use super::text::{TextFault, are_integers, number};

/// colibri's ROUTE_TRACE.
pub struct ColibriTrace;

impl Importer for ColibriTrace {
    fn name(&self) -> &'static str {
        "colibri-trace"
    }

    fn description(&self) -> &'static str {
        "ROUTE_TRACE of colibri: call, row, layer, then id:gate of each expert"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        sample_lines(sample).next().is_some_and(|line| {
            let mut words = line.split_ascii_whitespace();
            are_integers(words.by_ref().take(3))
                && words.clone().count() > 0
                && words.all(|word| {
                    word.split_once(':').is_some_and(|(id, gate)| {
                        id.parse::<i64>().is_ok() && gate.parse::<f32>().is_ok()
                    })
                })
        })
    }

    fn import(
        &self,
        source: &Source,
        _options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        for file in source.files() {
            output.begin_file(file);
            let mut passes = Passes::default();
            let mut last_call = None;
            let mut lines = Lines::open(file)?;
            while let Some((line, text)) = lines.next_line()? {
                let at = || At::Line(line);
                let parsed = match parse(text) {
                    Ok(parsed) => parsed,
                    Err(fault) => {
                        lines.cut_or(lines.invalid(fault), output)?;
                        continue;
                    }
                };
                let is_same_layer = last_call.replace(parsed.call) == Some(parsed.call);
                let row = RoutingRow {
                    token_id: passes.row(parsed.layer, parsed.row, is_same_layer),
                    ..RoutingRow::at_layer(parsed.layer)
                };
                let experts = parsed.experts.iter().map(|&(id, gate)| (id, Some(gate)));
                output.token(at, &row, experts)?;
            }
        }
        output.note("gates have four decimals; sequences and phases are not told");
        Ok(())
    }
}

struct Parsed {
    call: u64,
    row: u32,
    layer: LayerId,
    experts: Vec<(i64, f32)>,
}

fn parse(text: &str) -> Result<Parsed, TextFault> {
    let mut words = text.split_ascii_whitespace();
    let mut next = |name| words.next().ok_or(TextFault::Missing(name));
    let (call, row, layer) = (next("call")?, next("row")?, next("layer")?);
    let experts = words.map(|word| {
        let (id, gate) = word
            .split_once(':')
            .ok_or(TextFault::Line("an expert is not id:gate"))?;
        Ok((number("expert", id)?, number("gate", gate)?))
    });
    Ok(Parsed {
        call: number("call", call)?,
        row: number("row", row)?,
        layer: number("layer", layer)?,
        experts: experts.collect::<Result<_, TextFault>>()?,
    })
}
