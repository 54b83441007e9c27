//! Route CSV of [BigMoeOnEdge](https://github.com/Helldez/BigMoeOnEdge): one line per token, layer and expert.
//!
//! ```text
//! # route_trace v1
//! # model=... arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=6
//! # layer=0 expert_bytes=3059712 dense_bytes=11953152
//! turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped
//! 0,0,0,0,0,83,0.529533,0,13219200,0
//! ```
//!
//! | column | meaning |
//! |---|---|
//! | `turn` | sequence |
//! | `phase` | 0 prompt, 1 decode |
//! | `step` | token position; negative: unknown |
//! | `slot` | rank of the expert for the token |
//! | `weight` | router weight; `nan`: unknown |
//! | `residency` | above 0: the expert was in the cache |
//! | `expert_bytes` | bytes read for this line |
//! | `dropped` | above 0: the expert was selected, but neither read nor computed |
//!
//! Columns are found by name, because version 1 gained columns (`dropped`). The lane is a cache hit if `residency` is above 0, a
//! cache miss if `residency` is 0 and `expert_bytes` is above 0, and otherwise unknown: the expert was read for another token of the
//! batch, or dropped. In the preamble, `expert_bytes` is the size of an expert of the layer.
//!
//! A file may contain several runs, each with a header and an optional preamble. Each run numbers its turns from 0; the importer
//! renumbers those of later runs. Compared with our records, the format lacks timestamps and other lanes. The importer ignores the
//! bytes read per line and `dense_bytes`.
//!
//! Definition: `docs/telemetry.md` in that repository.

use std::path::Path;

use moe_files::text::counted;
use moe_trace::record::lane;
use moe_trace::{ModelInfo, Phase, RoutingRow, TokenId};

use crate::source::{Lines, sample_lines};
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source, check_model};

use super::shared::text::{
    Columns, LineError, has_columns, number, optional_number, required_number, shown,
};

const MAGIC: &str = "# route_trace v";
const VERSION: &str = "1";
/// Required columns.
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

/// Importer of route CSV.
pub struct BigMoeOnEdge;

impl Importer for BigMoeOnEdge {
    fn name(&self) -> &'static str {
        "bigmoeonedge"
    }

    fn description(&self) -> &'static str {
        "route CSV of BigMoeOnEdge, with router weights and cache hits: routing"
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
        let mut special = SpecialRows::default();
        for file in source.files() {
            output.begin_file(file);
            import_file(file, &mut special, output)?;
        }
        special.note(output);
        Ok(())
    }
}

/// Numbers of rows that need a note.
#[derive(Default)]
struct SpecialRows {
    n_dropped: u64,
    n_without_position: u64,
}

impl SpecialRows {
    fn note(&self, output: &mut Output<'_>) {
        if self.n_dropped > 0 {
            output.note(format!(
                "{} with dropped = 1 (selected, but neither read nor computed): the lane is unknown",
                counted(self.n_dropped, "row")
            ));
        }
        if self.n_without_position > 0 {
            output.note(format!(
                "skipped {} with a negative step, whose token position is unknown",
                counted(self.n_without_position, "row")
            ));
        }
        output.note("the bytes read per row and the dense bytes of a layer are ignored");
    }
}

fn import_file(
    source: &Path,
    special: &mut SpecialRows,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let mut lines = Lines::open(source)?;
    let mut model_info = ModelInfo::default();
    let mut table: Option<Columns<10>> = None;
    let mut turns = Turns::default();
    while let Some((line, text)) = lines.next_line()? {
        if let Some(version) = text.strip_prefix(MAGIC)
            && version != VERSION
        {
            return Err(output.version(Location::Line(line), shown(version), VERSION));
        }
        if let Some(comment) = text.strip_prefix('#') {
            if let Err(error) = read_comment(comment, &mut model_info) {
                lines.skip_truncated(lines.invalid(error), output)?;
            }
            continue;
        }
        let row = table.as_mut().map(|columns| read_row(columns, text));
        match row {
            Some(Ok(Row::Routed { row, is_dropped })) => {
                special.n_dropped += u64::from(is_dropped);
                let sequence_id = turns.sequence(row.sequence_id);
                output.routing(|| Location::Line(line), &RoutingRow { sequence_id, ..row })?;
            }
            Some(Ok(Row::WithoutPosition)) => special.n_without_position += 1,
            Some(Err(error)) if !has_columns(text, &REQUIRED) => {
                lines.skip_truncated(lines.invalid(error), output)?;
            }
            Some(Err(_)) | None => {
                let columns = Columns::of(text, COLUMNS, REQUIRED.len(), output);
                let columns = columns.map_err(|error| lines.invalid(error))?;
                turns.next_run(columns.has("turn"));
                table = Some(columns);
                check_model(output.known_model_info(), &model_info, source)?;
                output.model_info(&model_info)?;
                model_info = ModelInfo::default();
            }
        }
    }
    Ok(())
}

/// Maps the turns of several runs to sequences.
#[derive(Default)]
struct Turns {
    /// Number of sequences before the current run.
    first: u32,
    /// Number of sequences so far.
    n: u32,
    /// Whether the current run has the column `turn`.
    has_column: bool,
}

impl Turns {
    fn next_run(&mut self, has_column: bool) {
        self.first = self.n;
        self.has_column = has_column;
    }

    /// The sequence of a turn. A row with an empty `turn` has no known sequence. A run without the column is one sequence, which
    /// is unset for the first run.
    fn sequence(&mut self, turn: Option<u32>) -> Option<u32> {
        if turn.is_none() && self.has_column {
            return None;
        }
        let sequence = self.first.saturating_add(turn.unwrap_or(0));
        self.n = self.n.max(sequence.saturating_add(1));
        (self.has_column || self.first > 0).then_some(sequence)
    }
}

fn read_comment(comment: &str, model_info: &mut ModelInfo) -> Result<(), LineError> {
    let mut layer = None;
    for (key, value) in comment
        .split_whitespace()
        .filter_map(|word| word.split_once('='))
    {
        match key {
            "model" => model_info.model = Some(value.to_owned()),
            "arch" => model_info.arch = Some(value.to_owned()),
            "n_layer" => model_info.n_layer = Some(number("n_layer", value)?),
            "n_expert" => model_info.n_expert = Some(number("n_expert", value)?),
            "n_expert_used" => model_info.n_expert_used = Some(number("n_expert_used", value)?),
            "layer" => layer = Some(number("layer", value)?),
            "expert_bytes" => {
                let layer = layer.ok_or(LineError::Format("expert_bytes has no layer"))?;
                model_info
                    .expert_bytes
                    .insert(layer, number("expert_bytes", value)?);
            }
            _ => {}
        }
    }
    Ok(())
}

/// A line of the table.
enum Row {
    Routed { row: RoutingRow, is_dropped: bool },
    WithoutPosition,
}

fn read_row(columns: &mut Columns<10>, text: &str) -> Result<Row, LineError> {
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
            Some(phase) => Some(
                Phase::from_number(phase)
                    .ok_or(LineError::Format("phase is not 0 (prompt) or 1 (decode)"))?,
            ),
        },
        layer_id: required_number("layer", layer)?,
        slot: required_number("slot", slot)?,
        expert_id: required_number("expert", expert)?,
        weight: weight.filter(|weight| !weight.is_nan()), // nan is an unknown weight
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
        TokenId::try_from(step).map_err(|_| LineError::Format("step is above 2^32 - 1"))?;
    Ok(Row::Routed {
        row: RoutingRow { token_id, ..row },
        is_dropped,
    })
}
