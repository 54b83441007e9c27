//! The route CSV of BigMoeOnEdge: a preamble about the model, then a row for each expert of each token.
//!
//! ```text
//! # route_trace v1
//! # model=... arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=6
//! # layer=0 expert_bytes=3059712 dense_bytes=11953152
//! turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped
//! 0,0,0,0,0,83,0.529533,0,13219200,0
//! ```
//!
//! Version 1 appends columns (`dropped` came after `expert_bytes`), so columns are read by name. `residency` is 0 for a miss,
//! above 0 for a hit; `expert_bytes` of a row are the bytes that were read for it. An expert that was resident is a cache hit;
//! one that was read is a miss; one that was neither (it was read for another token of the batch, or `dropped`: routed, but
//! neither read nor computed) has no known lane. A negative `step` means that the position of the token is unknown.
//!
//! A file may hold several runs, one after the other, each with a header and perhaps a preamble. Each counts its turns from 0, so
//! those of later runs are counted on.

use std::path::Path;

use moe_trace::record::lane;
use moe_trace::{Facts, Phase, RoutingRow, TokenId};

use crate::source::{Lines, sample_lines};
use crate::{At, ForeignError, ImportOptions, Importer, Output, Source, check_model};

use super::text::{Columns, TextFault, has_columns, number, optional_number, required_number};

const MAGIC: &str = "# route_trace v";
const VERSION: &str = "1";
/// Columns without which a row has no meaning.
const REQUIRED: [&str; 4] = ["step", "layer", "slot", "expert"];
const COLUMNS: [&str; 10] = [
    REQUIRED[0],
    REQUIRED[1],
    REQUIRED[2],
    REQUIRED[3],
    "turn",
    "phase",
    "weight",
    "residency",
    "expert_bytes",
    "dropped",
];

/// Route CSV.
pub struct BigMoeOnEdge;

impl Importer for BigMoeOnEdge {
    fn name(&self) -> &'static str {
        "bigmoeonedge"
    }

    fn description(&self) -> &'static str {
        "route CSV of BigMoeOnEdge: every expert of every token, with weights and cache residency"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        let header = sample_lines(sample).find(|line| !line.starts_with('#'));
        sample_lines(sample)
            .next()
            .is_some_and(|line| line.starts_with(MAGIC))
            || header.is_some_and(|line| has_columns(line, &REQUIRED))
    }

    fn import(
        &self,
        source: &Source,
        _options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        let mut lost = Lost::default();
        for file in source.files() {
            output.begin_file(file);
            import_file(file, &mut lost, output)?;
        }
        lost.note(output);
        Ok(())
    }
}

/// What is not handed over as it is in the file.
#[derive(Default)]
struct Lost {
    dropped: u64,
    without_position: u64,
}

impl Lost {
    fn note(&self, output: &mut Output<'_>) {
        if self.dropped > 0 {
            output.note(format!(
                "{} of the routing with dropped = 1: routed, but neither read nor computed; their lane is unknown",
                rows(self.dropped)
            ));
        }
        if self.without_position > 0 {
            output.note(format!(
                "left out: {} with a negative step, whose token has no known position",
                rows(self.without_position)
            ));
        }
        output.note("bytes read for a row, and bytes of the dense part of a layer, were left out");
    }
}

fn rows(n: u64) -> String {
    moe_gguf::text::counted(n, "row")
}

fn import_file(
    source: &Path,
    lost: &mut Lost,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let mut lines = Lines::open(source)?;
    let mut facts = Facts::default();
    let mut table: Option<Columns<10>> = None;
    let mut turns = Turns::default();
    while let Some((line, text)) = lines.next_line()? {
        if let Some(version) = text.strip_prefix(MAGIC)
            && version != VERSION
        {
            let shown: String = version.chars().take(32).collect();
            let reason =
                format!("version {shown:?} of the route trace is not supported ({VERSION} is)");
            return Err(lines.invalid(reason));
        }
        if let Some(comment) = text.strip_prefix('#') {
            if let Err(fault) = read_comment(comment, &mut facts) {
                lines.cut_or(lines.invalid(fault), output)?;
            }
            continue;
        }
        let row = table.as_mut().map(|columns| read_row(columns, text));
        match row {
            Some(Ok(Row::Routed { row, is_dropped })) => {
                lost.dropped += u64::from(is_dropped);
                let sequence_id = turns.sequence(row.sequence_id);
                output.routing(|| At::Line(line), &RoutingRow { sequence_id, ..row })?;
            }
            Some(Ok(Row::WithoutPosition)) => lost.without_position += 1,
            Some(Err(fault)) if !has_columns(text, &REQUIRED) => {
                lines.cut_or(lines.invalid(fault), output)?;
            }
            Some(Err(_)) | None => {
                let columns = Columns::of(text, COLUMNS, REQUIRED.len(), output);
                let columns = columns.map_err(|fault| lines.invalid(fault))?;
                turns.next_run(columns.has("turn"));
                table = Some(columns);
                check_model(output.known(), &facts, source)?;
                output.facts(&facts)?;
                facts = Facts::default();
            }
        }
    }
    Ok(())
}

/// The sequences of the turns of several runs.
#[derive(Default)]
struct Turns {
    /// Sequences before the run.
    first: u32,
    /// Sequences so far.
    n: u32,
    /// Whether the run has a column for them.
    has_column: bool,
}

impl Turns {
    fn next_run(&mut self, has_column: bool) {
        self.first = self.n;
        self.has_column = has_column;
    }

    /// The sequence of a turn. A run without the column is one sequence, unknown where it is the first; a row without a turn
    /// in the column is of an unknown one.
    fn sequence(&mut self, turn: Option<u32>) -> Option<u32> {
        if turn.is_none() && self.has_column {
            return None;
        }
        let sequence = self.first.saturating_add(turn.unwrap_or(0));
        self.n = self.n.max(sequence.saturating_add(1));
        (self.has_column || self.first > 0).then_some(sequence)
    }
}

fn read_comment(comment: &str, facts: &mut Facts) -> Result<(), TextFault> {
    let mut layer = None;
    for (key, value) in comment
        .split_whitespace()
        .filter_map(|word| word.split_once('='))
    {
        match key {
            "model" => facts.model = Some(value.to_owned()),
            "arch" => facts.arch = Some(value.to_owned()),
            "n_layer" => facts.n_layer = Some(number("n_layer", value)?),
            "n_expert" => facts.n_expert = Some(number("n_expert", value)?),
            "n_expert_used" => facts.n_expert_used = Some(number("n_expert_used", value)?),
            "layer" => layer = Some(number("layer", value)?),
            "expert_bytes" => {
                let layer = layer.ok_or(TextFault::Line("expert_bytes without a layer"))?;
                facts
                    .expert_bytes
                    .insert(layer, number("expert_bytes", value)?);
            }
            _ => {}
        }
    }
    Ok(())
}

/// A row of the table.
enum Row {
    Routed { row: RoutingRow, is_dropped: bool },
    WithoutPosition,
}

fn read_row(columns: &mut Columns<10>, text: &str) -> Result<Row, TextFault> {
    let [
        step,
        layer,
        slot,
        expert,
        turn,
        phase,
        weight,
        residency,
        bytes,
        dropped,
    ] = columns.fields(text)?;
    let step: i64 = required_number("step", step)?;
    let phase: Option<u8> = optional_number("phase", phase)?;
    let residency: Option<u8> = optional_number("residency", residency)?;
    let bytes: Option<u64> = optional_number("expert_bytes", bytes)?;
    let dropped: Option<u8> = optional_number("dropped", dropped)?;
    let is_dropped = dropped.is_some_and(|dropped| dropped > 0);
    let weight: Option<f32> = optional_number("weight", weight)?;
    let row = RoutingRow {
        token_id: TokenId(0),
        sequence_id: optional_number("turn", turn)?,
        phase: match phase {
            None => None,
            Some(phase) => Some(Phase::of(phase).ok_or(TextFault::Line(
                "phase is neither 0 (prompt) nor 1 (decode)",
            ))?),
        },
        layer_id: required_number("layer", layer)?,
        slot: required_number("slot", slot)?,
        expert_id: required_number("expert", expert)?,
        weight: weight.filter(|weight| !weight.is_nan()), // the tool writes nan for an unknown weight
        lane: match (residency, bytes) {
            _ if is_dropped => None,
            (Some(1..), _) => Some(lane::CACHE_HIT),
            (Some(0), Some(1..)) => Some(lane::CACHE_MISS),
            _ => None,
        },
        timestamp_ns: None,
    };
    if step < 0 {
        return Ok(Row::WithoutPosition);
    }
    let token_id =
        TokenId::try_from(step).map_err(|_| TextFault::Line("step is above 2^32 - 1"))?;
    Ok(Row::Routed {
        row: RoutingRow { token_id, ..row },
        is_dropped,
    })
}
