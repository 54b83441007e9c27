//! Route CSV of [BigMoeOnEdge](https://github.com/Helldez/BigMoeOnEdge): one line per token, layer and expert.
//!
//! The layout is described in [`crate::importers::bigmoeonedge`]. Compared with our records, the format lacks timestamps and
//! all lanes except cache hits and misses: `residency` is 1 for a hit, and `expert_bytes` is above 0 for a miss. An unknown
//! router weight is written as `nan`, which number parsers accept.

use std::io::Write;

use moe_trace::record::lane;
use moe_trace::{ModelInfo, Phase, RoutingRow, SinkError};

use crate::{Export, ExportError, Exporter, UnsupportedTrace};

use super::note_n_expert;
use super::tokens::for_each_token;

/// Exporter of route CSV.
pub struct BigMoeOnEdge;

impl Exporter for BigMoeOnEdge {
    fn name(&self) -> &'static str {
        "bigmoeonedge"
    }

    fn description(&self) -> &'static str {
        "route CSV for the simulators of BigMoeOnEdge: routing"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let phases_are_known = export.counts.iter().all(|(_, phase, _)| phase.is_some());
        if export.summary.is_ordered() && !phases_are_known {
            return Err(ExportError::Missing {
                format: self.name(),
                what: "phases",
                hint: "convert it to jsonl, where phases are optional",
            });
        }
        write_preamble(export.model_info(), export.n_expert(), out)?;
        let mut found = Found::default();
        for_each_token(export, self.name(), |rows| {
            rows.iter()
                .try_for_each(|row| write_row(row, export.model_info(), &mut found, out))
        })?;
        let mut losses = found.losses();
        losses.extend(note_n_expert(export));
        Ok(losses)
    }
}

fn write_preamble(
    model_info: &ModelInfo,
    n_expert: u32,
    out: &mut dyn Write,
) -> Result<(), ExportError> {
    writeln!(out, "# route_trace v1")?;
    write!(out, "#")?;
    let word = |text: &String| text.split_whitespace().collect::<Vec<_>>().join("_");
    let pairs = [
        ("model", model_info.model.as_ref().map(word)),
        ("arch", model_info.arch.as_ref().map(word)),
        ("n_layer", model_info.n_layer.map(|n| n.to_string())),
        ("n_expert", Some(n_expert.to_string())),
        (
            "n_expert_used",
            model_info.n_expert_used.map(|n| n.to_string()),
        ),
    ];
    for (key, value) in pairs {
        if let Some(value) = value {
            write!(out, " {key}={value}")?;
        }
    }
    writeln!(out)?;
    for (layer, bytes) in &model_info.expert_bytes {
        writeln!(out, "# layer={layer} expert_bytes={bytes}")?;
    }
    writeln!(
        out,
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
    )?;
    Ok(())
}

/// What occurred in the rows and the format cannot represent.
#[derive(Default)]
struct Found {
    unknown_weights: bool,
    other_lanes: bool,
    misses_without_size: bool,
    tokens_without_sequence: bool,
    tokens_with_sequence: bool,
}

impl Found {
    fn losses(&self) -> Vec<String> {
        let notes = [
            (
                self.unknown_weights,
                "unknown router weights are written as nan",
            ),
            (
                self.other_lanes,
                "lanes other than cache hits and misses are lost",
            ),
            (
                self.misses_without_size,
                "cache misses are lost where the size of the expert is unknown; the GGUF file of the model contains it",
            ),
            (
                self.tokens_without_sequence,
                "tokens without a known sequence are written as turn 0",
            ),
        ];
        let mut losses = vec!["timestamps are lost".to_owned()];
        losses.extend(
            notes
                .iter()
                .filter(|(is_found, _)| *is_found)
                .map(|&(_, note)| note.to_owned()),
        );
        losses
    }
}

fn write_row(
    row: &RoutingRow,
    model_info: &ModelInfo,
    found: &mut Found,
    out: &mut dyn Write,
) -> Result<(), SinkError> {
    let size = model_info
        .expert_bytes
        .get(&row.layer_id)
        .copied()
        .filter(|&size| size > 0);
    let (residency, bytes) = match (row.lane, size) {
        (Some(lane::CACHE_HIT), _) => (1, 0),
        (Some(lane::CACHE_MISS), Some(size)) => (0, size),
        (Some(lane::CACHE_MISS), None) => {
            found.misses_without_size = true;
            (0, 0)
        }
        (lane, _) => {
            found.other_lanes |= lane.is_some();
            (0, 0)
        }
    };
    found.tokens_without_sequence |= row.sequence_id.is_none();
    found.tokens_with_sequence |= row.sequence_id.is_some();
    if found.tokens_without_sequence && found.tokens_with_sequence {
        return Err(SinkError::Refused(UnsupportedTrace::MixedSequences.into()));
    }
    found.unknown_weights |= row.weight.is_none();
    let phase = match row.phase {
        Some(Phase::Generate) => 1,
        _ => 0,
    };
    write!(
        out,
        "{},{phase},{},{},{},{},",
        row.sequence_id.unwrap_or(0),
        row.token_id,
        row.layer_id,
        row.slot,
        row.expert_id
    )?;
    match row.weight {
        Some(weight) => write!(out, "{weight}")?,
        None => write!(out, "nan")?,
    }
    Ok(writeln!(out, ",{residency},{bytes}")?)
}
