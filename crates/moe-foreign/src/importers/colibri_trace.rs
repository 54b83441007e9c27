//! ROUTE_TRACE of [colibri](https://github.com/JustVugg/colibri): one line per token and layer.
//!
//! ```text
//! call row layer id:gate id:gate ...
//! ```
//!
//! `call` numbers the layer computations (not the passes), `row` the tokens of a batch, and `gate` is the router weight with four
//! decimals. Positions are derived from the order of layers ([`crate::passes`]). Compared with our records, the format lacks
//! sequences, phases and timestamps.
//!
//! Definition: `c/route_trace.h` in that repository.

use moe_trace::{LayerId, RoutingRow};

use crate::passes::Passes;
use crate::source::{Lines, sample_lines};
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

use super::shared::text::{LineError, are_integers, number};

/// Importer of ROUTE_TRACE.
pub struct ColibriTrace;

impl Importer for ColibriTrace {
    fn name(&self) -> &'static str {
        "colibri-trace"
    }

    fn description(&self) -> &'static str {
        "ROUTE_TRACE of colibri, lines of call, row, layer and id:gate: routing"
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
                let at = || Location::Line(line);
                let parsed = match parse(text) {
                    Ok(parsed) => parsed,
                    Err(error) => {
                        lines.skip_truncated(lines.invalid(error), output)?;
                        continue;
                    }
                };
                let is_same_layer = last_call.replace(parsed.call) == Some(parsed.call);
                let row = RoutingRow {
                    token_id: passes.token(parsed.layer, parsed.row, is_same_layer),
                    ..RoutingRow::at_layer(parsed.layer)
                };
                let experts = parsed.experts.iter().map(|&(id, gate)| (id, Some(gate)));
                output.token(at, &row, experts)?;
            }
        }
        output.note("router weights have four decimals; sequences and phases are not recorded");
        Ok(())
    }
}

struct Parsed {
    call: u64,
    row: u32,
    layer: LayerId,
    experts: Vec<(i64, f32)>,
}

fn parse(text: &str) -> Result<Parsed, LineError> {
    let mut words = text.split_ascii_whitespace();
    let mut next = |name| words.next().ok_or(LineError::Missing(name));
    let (call, row, layer) = (next("call")?, next("row")?, next("layer")?);
    let experts = words.map(|word| {
        let (id, gate) = word
            .split_once(':')
            .ok_or(LineError::Format("an expert is not id:gate"))?;
        Ok((number("expert", id)?, number("gate", gate)?))
    });
    Ok(Parsed {
        call: number("call", call)?,
        row: number("row", row)?,
        layer: number("layer", layer)?,
        experts: experts.collect::<Result<_, LineError>>()?,
    })
}
