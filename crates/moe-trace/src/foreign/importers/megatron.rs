//! Megatron-LM's `router_trace_rank{r}.jsonl`: a line for each step, block and layer, with the experts of all its tokens.
//!
//! A rank sees tokens of its own, so each is told as a sequence in which the tokens of its steps are counted on. Routers that
//! hand out a mask lose the rank of the experts: their ids then ascend. Layers of the multi-token predictor have numbers of
//! their own and are left out.

use std::collections::BTreeMap;

use moe_gguf::text::counted;
use serde::Deserialize;

use crate::foreign::{At, ForeignError, Importer, Options, Output, RoutingRow, Source};

use super::jsonl::{Nested, each_line, first_line_has};

/// Megatron-LM's router trace.
pub struct Megatron;

#[derive(Deserialize)]
struct Line {
    step: u64,
    block: Option<String>,
    layer: u16,
    rank: Option<u32>,
    num_tokens: u32,
    topk: Option<usize>,
    top_indices: Nested<i64>,
}

/// Where the step of a rank begins.
#[derive(Default)]
struct Steps {
    step: u64,
    start: u32,
    n_tokens: u32,
}

impl Steps {
    fn start(&mut self, step: u64, n_tokens: u32) -> u32 {
        if step != self.step {
            self.step = step;
            self.start = self.start.saturating_add(self.n_tokens);
            self.n_tokens = 0;
        }
        self.n_tokens = self.n_tokens.max(n_tokens);
        self.start
    }
}

impl Importer for Megatron {
    fn name(&self) -> &'static str {
        "megatron"
    }

    fn description(&self) -> &'static str {
        "router_trace_rank*.jsonl of Megatron-LM: the experts of every token, by step and layer"
    }

    fn is_applicable(&self, sample: &[u8]) -> bool {
        first_line_has(sample, &["step", "layer", "num_tokens", "top_indices"])
    }

    fn takes_directories(&self) -> bool {
        true
    }

    fn import(
        &self,
        source: &Source,
        _options: &Options,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        // One entry a rank, 65,536 at most.
        let mut ranks: BTreeMap<u16, Steps> = BTreeMap::new();
        let mut left_out = 0u64;
        each_line(source, output, |line: &Line, number, output| {
            if line
                .block
                .as_deref()
                .is_some_and(|block| block != "decoder")
            {
                left_out += 1;
                return Ok(());
            }
            hand_over(line, number, &mut ranks, output)
        })?;
        if left_out > 0 {
            output.note(format!(
                "left out: {} of blocks other than the decoder",
                counted(left_out, "line")
            ));
        }
        output.note(
            "each rank is told as a sequence; slots are ranks only where the router gave them in order; weights and phases are \
             not told",
        );
        Ok(())
    }
}

fn hand_over(
    line: &Line,
    number: u64,
    ranks: &mut BTreeMap<u16, Steps>,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let at = || At::Line(number);
    let rank = line.rank.unwrap_or(0);
    let steps = u16::try_from(rank).map_err(|_| {
        output.invalid(
            at(),
            format!("rank {rank} is above 65535; the line is damaged"),
        )
    })?;
    let steps = ranks.entry(steps).or_default();
    let is_shape = line.top_indices.len() == line.num_tokens as usize
        && line
            .topk
            .is_none_or(|topk| line.top_indices.iter().all(|experts| experts.len() == topk));
    if !is_shape {
        let reason = "top_indices is not num_tokens lists of topk ids; the line is damaged";
        return Err(output.invalid(at(), reason));
    }
    let start = steps.start(line.step, line.num_tokens);
    for (token, experts) in (0..).zip(line.top_indices.iter()) {
        let row = RoutingRow {
            token_id: start.saturating_add(token),
            sequence_id: Some(rank),
            ..RoutingRow::at_layer(line.layer)
        };
        output.token(at, &row, experts.iter().map(|&expert| (expert, None)))?;
    }
    Ok(())
}
