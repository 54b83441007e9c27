//! The route CSV of BigMoeOnEdge: a preamble about the model, then a row for each expert of each token.
//!
//! ```text
//! # route_trace v1
//! # model=... arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=6
//! # layer=0 expert_bytes=3059712 dense_bytes=11953152
//! turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
//! 0,0,0,0,0,83,0.529533,0,13219200
//! ```
//!
//! `expert_bytes` of a row are the bytes that were read for it. An expert that was resident is a cache hit; one that was
//! read is a miss; one that was neither (it was read for another token of the batch) is left unknown.

use crate::foreign::{
    At, Facts, ForeignError, Importer, Lines, Options, Output, Phase, RoutingRow, Source,
    sample_lines,
};
use crate::record::lane;

use super::text::number;

const MAGIC: &str = "# route_trace v1";
const HEADER: &str = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes";

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
        sample_lines(sample).next() == Some(MAGIC)
            || sample_lines(sample).find(|line| !line.starts_with('#')) == Some(HEADER)
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
        output.note("bytes read for a row, and bytes of the dense part of a layer, were left out");
        Ok(())
    }
}

fn import_file(mut lines: Lines, output: &mut Output<'_>) -> Result<(), ForeignError> {
    let mut facts = Facts::default();
    let mut in_preamble = true;
    while let Some((line, text)) = lines.next_line()? {
        if let Some(comment) = text.strip_prefix('#') {
            if in_preamble && let Err(reason) = read_comment(comment, &mut facts) {
                return Err(lines.invalid(reason));
            }
        } else if in_preamble {
            if text != HEADER {
                return Err(lines.invalid(format!("this is not the header {HEADER}")));
            }
            output.facts(&facts)?;
            in_preamble = false;
        } else {
            match read_row(text) {
                Ok(row) => output.routing(|| At::Line(line), &row)?,
                Err(reason) => lines.cut_or(lines.invalid(reason), output)?,
            }
        }
    }
    Ok(())
}

fn read_comment(comment: &str, facts: &mut Facts) -> Result<(), String> {
    let mut layer = None;
    for (key, value) in comment
        .split_whitespace()
        .filter_map(|word| word.split_once('='))
    {
        match key {
            "model" => facts.model = Some(value.to_owned()),
            "arch" => facts.arch = Some(value.to_owned()),
            "n_layer" => facts.n_layer = Some(number(key, value)?),
            "n_expert" => facts.n_expert = Some(number(key, value)?),
            "n_expert_used" => facts.n_expert_used = Some(number(key, value)?),
            "layer" => layer = Some(number(key, value)?),
            "expert_bytes" => {
                let layer = layer.ok_or("expert_bytes without a layer; the preamble is damaged")?;
                facts.expert_bytes.insert(layer, number(key, value)?);
            }
            _ => {}
        }
    }
    Ok(())
}

fn read_row(text: &str) -> Result<RoutingRow, String> {
    let mut fields = text.split(',');
    let mut next = |name: &'static str| {
        fields
            .next()
            .ok_or(format!("no {name}; the line is damaged"))
    };
    let turn = number("turn", next("turn")?)?;
    let phase: u8 = number("phase", next("phase")?)?;
    let step = number("step", next("step")?)?;
    let layer_id = number("layer", next("layer")?)?;
    let slot = number("slot", next("slot")?)?;
    let expert_id = number("expert", next("expert")?)?;
    let weight = number("weight", next("weight")?)?;
    let residency: u8 = number("residency", next("residency")?)?;
    let expert_bytes: u64 = number("expert_bytes", next("expert_bytes")?)?;
    if fields.next().is_some() {
        return Err("more than nine values; the line is damaged".into());
    }
    let phase = Phase::of(phase);
    Ok(RoutingRow {
        token_id: step,
        sequence_id: Some(turn),
        phase: Some(
            phase.ok_or("phase is neither 0 (prompt) nor 1 (decode); the line is damaged")?,
        ),
        layer_id,
        slot,
        expert_id,
        weight: Some(weight).filter(|weight: &f32| !weight.is_nan()), // how our exporter writes one that is not known
        lane: match (residency, expert_bytes) {
            (1.., _) => Some(lane::CACHE_HIT),
            (0, 1..) => Some(lane::CACHE_MISS),
            (0, 0) => None,
        },
        timestamp_ns: None,
    })
}
