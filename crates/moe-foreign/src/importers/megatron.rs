//! Megatron-LM's `router_trace_rank{r}.jsonl`: a line for each step, block and layer, with the experts of all its tokens.
//!
//! Each rank has tokens of its own, so it is read as a sequence in which the tokens of its steps follow one another. Routers
//! that return a mask lose the order of the experts: their ids then ascend. Layers of the multi-token predictor have numbers of
//! their own and are left out.
//!
//! A layer's number comes from the name of its module, `decoder.layers.N`, which counts from 0 in each pipeline stage and in each
//! virtual stage of a rank. Nothing in the trace tells the stages apart, so fewer layers than the model has are refused.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use moe_gguf::text::counted;
use moe_trace::{LayerId, RoutingRow, TokenId};
use serde::Deserialize;
use xxhash_rust::xxh3::Xxh3;

use crate::layers::{LayerError, Layouts};
use crate::{At, ForeignError, ImportOptions, Importer, Output, Source};

use super::jsonl::{Nested, each_line, first_line_has};

/// Ranks are below 2^16.
const MAX_RANK: u32 = 65_535;

/// Megatron-LM's router trace.
pub struct Megatron;

#[derive(Deserialize)]
struct Line {
    step: u64,
    block: Option<String>,
    layer: LayerId,
    rank: Option<u32>,
    num_tokens: u32,
    topk: Option<usize>,
    top_indices: Nested<i64>,
}

/// The tokens of a rank: its steps one after the other, and in a step its micro-batches.
///
/// A step has one or several micro-batches (gradient accumulation). Each goes through the layers once, so the n-th line of a
/// layer in a step is the n-th micro-batch, in whatever order the pipeline schedule computes layers. With activation
/// recomputation the backward pass routes a micro-batch again, to the same experts: a line that is equal to an earlier line of
/// its layer and step is counted once.
#[derive(Default)]
struct Rank {
    step: u64,
    /// Position of the first token of the step.
    start: u32,
    /// Tokens of each layer in the step so far.
    n_tokens: BTreeMap<LayerId, u32>,
    /// Hashes of the lines of the step: layer and experts.
    lines: HashSet<u128>,
}

impl Rank {
    /// The position of the first token of a line; `None` if the line is a recomputation.
    fn first_token(&mut self, line: &Line) -> Option<u32> {
        if line.step != self.step {
            self.step = line.step;
            self.start = self.start.saturating_add(self.step_tokens());
            self.n_tokens.clear();
            self.lines.clear();
        }
        if !self.lines.insert(hash(line)) {
            return None;
        }
        let n_tokens = self.n_tokens.entry(line.layer).or_default();
        let first = self.start.saturating_add(*n_tokens);
        *n_tokens = n_tokens.saturating_add(line.num_tokens);
        Some(first)
    }

    /// Tokens of the step so far: of the layer that has most.
    fn step_tokens(&self) -> u32 {
        self.n_tokens.values().copied().max().unwrap_or(0)
    }
}

/// A hash of what a line says about its layer.
fn hash(line: &Line) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(&line.layer.0.to_le_bytes());
    for experts in line.top_indices.iter() {
        hash.update(&experts.len().to_le_bytes());
        for expert in experts {
            hash.update(&expert.to_le_bytes());
        }
    }
    hash.digest128()
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
        options: &ImportOptions,
        output: &mut Output<'_>,
    ) -> Result<(), ForeignError> {
        // One entry a rank, 65,537 at most.
        let mut ranks: BTreeMap<Option<u32>, Rank> = BTreeMap::new();
        let (mut left_out, mut n_recomputed) = (0u64, 0u64);
        let mut layers = BTreeSet::new();
        each_line(source, output, |line: &Line, number, output| {
            if line
                .block
                .as_deref()
                .is_some_and(|block| block != "decoder")
            {
                left_out += 1;
                return Ok(());
            }
            layers.insert(line.layer);
            let is_recomputed = !hand_over(line, number, &mut ranks, output)?;
            n_recomputed += u64::from(is_recomputed);
            Ok(())
        })?;
        if n_recomputed > 0 {
            output.note(format!(
                "counted once: {} equal to an earlier line of their step and layer, as activation recomputation writes them",
                counted(n_recomputed, "line")
            ));
        }
        if left_out > 0 {
            output.note(format!(
                "left out: {} of blocks other than the decoder",
                counted(left_out, "line")
            ));
        }
        check_stages(layers.len(), options, output)?;
        output.note(
            "each rank is read as a sequence; slots are an order only if the router returned the experts in order; weights and \
             phases are unknown",
        );
        Ok(())
    }
}

/// Refuses a trace with fewer layers than the model has, which is of pipeline stages.
fn check_stages(
    n_layers: usize,
    options: &ImportOptions,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let layouts = Layouts::of(options.model.as_ref());
    match layouts.map_or(0, |layouts| layouts.n_moe()) {
        0 => output.note(
            "warning: the layers of each pipeline stage are numbered from 0; with pipeline parallelism those of different stages \
             were counted as one, which only the model's number of layers can show",
        ),
        n_moe if n_layers > 0 && n_layers < n_moe => {
            let source = LayerError::Stages { n_layers, n_moe };
            return Err(output.layers(At::Element("layer".into()), source));
        }
        _ => {}
    }
    Ok(())
}

/// Hands over the tokens of a line; returns whether they are new, not a recomputation.
fn hand_over(
    line: &Line,
    number: u64,
    ranks: &mut BTreeMap<Option<u32>, Rank>,
    output: &mut Output<'_>,
) -> Result<bool, ForeignError> {
    let at = || At::Line(number);
    if let Some(rank) = line.rank.filter(|&rank| rank > MAX_RANK) {
        let reason = format!("rank {rank} is above {MAX_RANK}; the line is damaged");
        return Err(output.invalid(at(), reason));
    }
    let is_shape = line.top_indices.len() == line.num_tokens as usize
        && line
            .topk
            .is_none_or(|topk| line.top_indices.iter().all(|experts| experts.len() == topk));
    if !is_shape {
        let reason = "top_indices is not num_tokens lists of topk ids; the line is damaged";
        return Err(output.invalid(at(), reason));
    }
    let Some(start) = ranks.entry(line.rank).or_default().first_token(line) else {
        return Ok(false);
    };
    for (token, experts) in (0..).zip(line.top_indices.iter()) {
        let row = RoutingRow {
            token_id: TokenId(start.saturating_add(token)),
            sequence_id: line.rank,
            ..RoutingRow::at_layer(line.layer)
        };
        output.token(at, &row, experts.iter().map(|&expert| (expert, None)))?;
    }
    Ok(true)
}
