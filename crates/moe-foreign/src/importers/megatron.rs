//! `router_trace_rank{r}.jsonl` of [Megatron-LM](https://github.com/NVIDIA/Megatron-LM): one line per step, layer and micro-batch.
//!
//! ```text
//! {"step":0,"stage":"pre_dispatch","block":"decoder","layer":0,"rank":0,"num_tokens":2,"topk":2,"top_indices":[[9,5],[3,1]]}
//! ```
//!
//! `top_indices` are the selected experts of each token. Each rank computes different tokens, so a rank is read as a sequence that
//! contains the tokens of all its steps. If the router returned a mask, ids are ascending, and the order of the experts is lost.
//! Lines of blocks other than `decoder` (MTP layers, which have their own numbers) are skipped.
//!
//! `layer` is the number in the module name `decoder.layers.N`, which starts at 0 in each pipeline stage and in each virtual stage of a
//! rank. The trace does not record the stage, so a trace with fewer layers than the model is rejected. Compared with our
//! records, the format lacks router weights, phases, timestamps and lanes.
//!
//! Definition: `megatron/core/transformer/moe/router_trace.py` in that repository.

mod micro_batches;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use moe_files::text::counted;
use moe_trace::{LayerId, RoutingRow, TokenId};
use serde::Deserialize;
use xxhash_rust::xxh3::Xxh3;

use crate::layers::{LayerError, Layouts};
use crate::{ForeignError, ImportOptions, Importer, Location, Output, Source};

use super::shared::json_lines::{Nested, first_line_has, for_each_line};
use micro_batches::StepLines;

/// Highest rank.
const MAX_RANK: u32 = 65_535;

/// Importer of router traces of Megatron-LM.
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

/// Numbers the tokens of a rank by step and micro-batch.
///
/// A step has one or several micro-batches (gradient accumulation). Each passes through every layer once, so the n-th line of a
/// layer in a step is the n-th micro-batch, in whatever order the pipeline schedule computes the layers. With activation
/// recomputation the backward pass routes a micro-batch again, to the same experts. These lines are not counted again, see
/// [`recomputed_lines`].
#[derive(Default)]
struct Rank {
    step: u64,
    /// Position of the first token of the step.
    start: u32,
    /// Number of tokens of each layer in the step so far.
    n_tokens: BTreeMap<LayerId, u32>,
}

impl Rank {
    /// The position of the first token of a line.
    fn first_token(&mut self, line: &Line) -> u32 {
        if line.step != self.step {
            self.step = line.step;
            self.start = self.start.saturating_add(self.step_tokens());
            self.n_tokens.clear();
        }
        let n_tokens = self.n_tokens.entry(line.layer).or_default();
        let first = self.start.saturating_add(*n_tokens);
        *n_tokens = n_tokens.saturating_add(line.num_tokens);
        first
    }

    /// Number of tokens of the step so far: the most of any layer.
    fn step_tokens(&self) -> u32 {
        self.n_tokens.values().copied().max().unwrap_or(0)
    }
}

/// The lines of a rank in its last step.
#[derive(Default)]
struct LastStep {
    step: u64,
    lines: StepLines,
    /// The file and the number of the first line.
    file: PathBuf,
    first_line: u64,
}

impl LastStep {
    /// Marks the recomputed lines of the step.
    fn mark(&self, is_recomputed: &mut [bool]) -> Result<(), ForeignError> {
        let Some(recomputed) = self.lines.recomputed() else {
            let reason = format!(
                "step {}: lines equal earlier lines of their layer, but not for the same micro-batches in all layers, so activation \
                 recomputation cannot be distinguished from tokens; remove the lines of this step, or record the trace without \
                 recomputation",
                self.step
            );
            let at = Location::Line(self.first_line);
            return Err(ForeignError::invalid(&self.file, at, reason));
        };
        for index in recomputed {
            is_recomputed[index] = true;
        }
        Ok(())
    }
}

/// For each line of the decoder, in order: whether activation recomputation wrote it.
///
/// A separate pass over the files: what a line is depends on the later lines of its step. It stores a hash for each line of a
/// step.
fn recomputed_lines(source: &Source, output: &mut Output<'_>) -> Result<Vec<bool>, ForeignError> {
    let mut is_recomputed = Vec::new();
    // At most 65,537 entries.
    let mut ranks: BTreeMap<Option<u32>, LastStep> = BTreeMap::new();
    for file in source.files() {
        let one_file = Source::file(file);
        for_each_line(&one_file, output, |line: &Line, number, output| {
            if is_of_other_block(line) {
                return Ok(());
            }
            check(line, number, output)?;
            let last = ranks.entry(line.rank).or_default();
            if last.lines.is_empty() || last.step != line.step {
                last.mark(&mut is_recomputed)?;
                *last = LastStep {
                    step: line.step,
                    lines: StepLines::default(),
                    file: file.clone(),
                    first_line: number,
                };
            }
            let index = is_recomputed.len();
            last.lines.push(line.layer, index, hash(line));
            is_recomputed.push(false);
            Ok(())
        })?;
    }
    for last in ranks.values() {
        last.mark(&mut is_recomputed)?;
    }
    Ok(is_recomputed)
}

fn is_of_other_block(line: &Line) -> bool {
    line.block
        .as_deref()
        .is_some_and(|block| block != "decoder")
}

/// A hash of the experts of a line.
fn hash(line: &Line) -> u128 {
    let mut hash = Xxh3::new();
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
        "router_trace_rank*.jsonl of Megatron-LM, a file or a directory: routing"
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
        let is_recomputed = recomputed_lines(source, output)?;
        let mut is_recomputed = is_recomputed.into_iter();
        // At most 65,537 entries.
        let mut ranks: BTreeMap<Option<u32>, Rank> = BTreeMap::new();
        let (mut n_other_blocks, mut n_recomputed) = (0u64, 0u64);
        let mut layers = BTreeSet::new();
        for_each_line(source, output, |line: &Line, number, output| {
            if is_of_other_block(line) {
                n_other_blocks += 1;
                return Ok(());
            }
            layers.insert(line.layer);
            // `None` for lines that were appended after the first pass.
            if is_recomputed.next() == Some(true) {
                n_recomputed += 1;
                return Ok(());
            }
            check(line, number, output)?;
            import_line(line, number, &mut ranks, output)
        })?;
        if n_recomputed > 0 {
            output.note(format!(
                "skipped {} equal to an earlier line of the same step and layer, which activation recomputation writes",
                counted(n_recomputed, "line")
            ));
        }
        if n_other_blocks > 0 {
            output.note(format!(
                "skipped {} of blocks other than the decoder",
                counted(n_other_blocks, "line")
            ));
        }
        check_stages(layers.len(), options, output)?;
        output.note(
            "each rank is read as a sequence; the slots are ordered by weight only if the router returned the experts in order; \
             router weights and phases are not recorded",
        );
        Ok(())
    }
}

/// Rejects a trace with fewer layers than the model, which was recorded with pipeline parallelism.
fn check_stages(
    n_layers: usize,
    options: &ImportOptions,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let layouts = Layouts::of(options.model.as_ref());
    match layouts.map_or(0, |layouts| layouts.n_moe()) {
        0 => output.note(
            "warning: each pipeline stage numbers its layers from 0, so with pipeline parallelism layers of different stages are \
             counted as one layer; specify the model to detect this",
        ),
        n_moe if n_layers > 0 && n_layers < n_moe => {
            let source = LayerError::Stages { n_layers, n_moe };
            return Err(output.layers(Location::Element("layer".into()), source));
        }
        _ => {}
    }
    Ok(())
}

/// Rejects a line with a rank or a shape that no recorder writes.
fn check(line: &Line, number: u64, output: &Output<'_>) -> Result<(), ForeignError> {
    let at = || Location::Line(number);
    if let Some(rank) = line.rank.filter(|&rank| rank > MAX_RANK) {
        let reason = format!("rank {rank} is out of range (0..={MAX_RANK}); the line is damaged");
        return Err(output.invalid(at(), reason));
    }
    let has_shape = line.top_indices.len() == line.num_tokens as usize
        && line
            .topk
            .is_none_or(|topk| line.top_indices.iter().all(|experts| experts.len() == topk));
    if !has_shape {
        let reason = "top_indices does not have the shape [num_tokens, topk]; the line is damaged";
        return Err(output.invalid(at(), reason));
    }
    Ok(())
}

/// Passes on the tokens of a line.
fn import_line(
    line: &Line,
    number: u64,
    ranks: &mut BTreeMap<Option<u32>, Rank>,
    output: &mut Output<'_>,
) -> Result<(), ForeignError> {
    let start = ranks.entry(line.rank).or_default().first_token(line);
    for (token, experts) in (0..).zip(line.top_indices.iter()) {
        let row = RoutingRow {
            token_id: TokenId(start.saturating_add(token)),
            sequence_id: line.rank,
            ..RoutingRow::at_layer(line.layer)
        };
        let at = || Location::Line(number);
        output.token(at, &row, experts.iter().map(|&expert| (expert, None)))?;
    }
    Ok(())
}
