//! The route CSV of BigMoeOnEdge.
//!
//! A weight that is not known is `nan`, which every reader of numbers takes. A row tells whether the expert was resident and
//! how many bytes were read for it, so hits and misses of a cache can be told, other lanes cannot.

use std::io::Write;

use moe_trace::record::lane;
use moe_trace::{Facts, Phase, RoutingRow, SinkError};

use crate::{Export, ExportError, Exporter};

use super::note_n_expert;
use super::tokens::for_each_token;

/// Route CSV.
pub struct BigMoeOnEdge;

impl Exporter for BigMoeOnEdge {
    fn name(&self) -> &'static str {
        "bigmoeonedge"
    }

    fn description(&self) -> &'static str {
        "route CSV of BigMoeOnEdge, for its simulators"
    }

    fn export(&self, export: &Export<'_>, out: &mut dyn Write) -> Result<Vec<String>, ExportError> {
        let phases_are_known = export.counts.iter().all(|(_, phase, _)| phase.is_some());
        if export.summary.is_ordered() && !phases_are_known {
            return Err(ExportError::Missing {
                format: self.name(),
                what: "phases",
                hint: "convert it to jsonl, which can be without them",
            });
        }
        write_preamble(export.facts(), export.n_expert(), out)?;
        let mut lost = Lost::default();
        for_each_token(export, self.name(), |rows| {
            rows.iter()
                .try_for_each(|row| write_row(row, export.facts(), &mut lost, out))
        })?;
        let mut losses = lost.losses();
        losses.extend(note_n_expert(export));
        Ok(losses)
    }
}

fn write_preamble(facts: &Facts, n_expert: u32, out: &mut dyn Write) -> Result<(), ExportError> {
    writeln!(out, "# route_trace v1")?;
    write!(out, "#")?;
    let word = |text: &String| text.split_whitespace().collect::<Vec<_>>().join("_");
    let pairs = [
        ("model", facts.model.as_ref().map(word)),
        ("arch", facts.arch.as_ref().map(word)),
        ("n_layer", facts.n_layer.map(|n| n.to_string())),
        ("n_expert", Some(n_expert.to_string())),
        ("n_expert_used", facts.n_expert_used.map(|n| n.to_string())),
    ];
    for (key, value) in pairs {
        if let Some(value) = value {
            write!(out, " {key}={value}")?;
        }
    }
    writeln!(out)?;
    for (layer, bytes) in &facts.expert_bytes {
        writeln!(out, "# layer={layer} expert_bytes={bytes}")?;
    }
    writeln!(
        out,
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
    )?;
    Ok(())
}

/// What the format could not hold.
#[derive(Default)]
struct Lost {
    weights: bool,
    lanes: bool,
    sizes: bool,
    sequences: bool,
    /// Whether other tokens have a known sequence.
    has_sequences: bool,
}

impl Lost {
    fn losses(&self) -> Vec<String> {
        let notes = [
            (self.weights, "router weights that are not known are nan"),
            (
                self.lanes,
                "lanes other than hits and misses of a cache were left out",
            ),
            (
                self.sizes,
                "cache misses were left out where the size of an expert is unknown; the model's file has it",
            ),
            (self.sequences, "tokens of no known sequence are of turn 0"),
        ];
        let mut losses = vec!["times were left out".to_owned()];
        losses.extend(
            notes
                .iter()
                .filter(|(is_lost, _)| *is_lost)
                .map(|&(_, note)| note.to_owned()),
        );
        losses
    }
}

fn write_row(
    row: &RoutingRow,
    facts: &Facts,
    lost: &mut Lost,
    out: &mut dyn Write,
) -> Result<(), SinkError> {
    let size = facts
        .expert_bytes
        .get(&row.layer_id)
        .copied()
        .filter(|&size| size > 0);
    let (residency, bytes) = match (row.lane, size) {
        (Some(lane::CACHE_HIT), _) => (1, 0),
        (Some(lane::CACHE_MISS), Some(size)) => (0, size),
        (Some(lane::CACHE_MISS), None) => {
            lost.sizes = true;
            (0, 0)
        }
        (lane, _) => {
            lost.lanes |= lane.is_some();
            (0, 0)
        }
    };
    lost.sequences |= row.sequence_id.is_none();
    lost.has_sequences |= row.sequence_id.is_some();
    if lost.sequences && lost.has_sequences {
        let reason = "only some tokens have a sequence, and each row of this format has a turn; convert it to jsonl";
        return Err(SinkError::Refused(reason.into()));
    }
    lost.weights |= row.weight.is_none();
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
