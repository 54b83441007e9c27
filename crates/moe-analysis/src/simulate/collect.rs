//! Grouping of the rows of a trace into batches.
//!
//! If the trace has timestamps, rows with equal layer and timestamp form a batch (an operation). Otherwise the prompt of a
//! sequence forms one batch per layer, independent of the order of its rows, and every other token is its own batch.

use std::sync::Arc;

use moe_placement::cache::Experts;
use moe_placement::plan::ExpertSizes;
use moe_trace::{
    CountRow, ExpertId, LayerId, MAX_ID, ModelInfo, Phase, RoutingRow, Sink, SinkError, TokenStarts,
};

use super::batches::TraceProperties;
use super::windows::Windows;
use super::{Batches, Error};

/// Number of bits of the expert id in a raw selection; the layer is in the higher bits.
const EXPERT_BITS: u32 = MAX_ID.trailing_zeros();

/// Phase of tokens whose phase is unknown.
const UNKNOWN_PHASE: u8 = 2;

/// Collects rows of routing into batches. Rejects counts. Omits blocks of an MTP head, which no cache of the model's layers
/// holds.
#[derive(Debug, Default)]
pub struct Collector {
    /// Layer and expert of each selection.
    selections: Vec<u32>,
    ends: Vec<u32>,
    phases: Vec<u8>,
    open: Option<Group>,
    tokens: TokenStarts,
    prompt: Prompt,
    n_expert: u32,
    /// Highest slot plus 1.
    n_expert_used: u32,
    model_info: ModelInfo,
    /// Number of selections in blocks of the MTP head.
    n_mtp_selections: u64,
    windows: Windows,
}

/// Common property of the rows of a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Group {
    Operation(LayerId, u64),
    /// One token without a timestamp.
    Token,
    /// Prompt of a sequence, without timestamps.
    Prompt(Option<u32>),
}

/// A prompt without timestamps, until it ends.
#[derive(Debug, Default)]
struct Prompt {
    /// Selections of each layer, in the order of the first occurrence of the layers.
    layers: Vec<(LayerId, Vec<u32>)>,
}

impl Prompt {
    fn push(&mut self, layer_id: LayerId, selection: u32) {
        // Searches from the end: rows of a layer are contiguous, or layers ascend.
        let place = self
            .layers
            .iter()
            .rposition(|(layer, _)| *layer == layer_id);
        match place {
            Some(place) => self.layers[place].1.push(selection),
            None => self.layers.push((layer_id, vec![selection])),
        }
    }
}

impl Collector {
    /// A collector without rows.
    pub fn new() -> Collector {
        Collector::default()
    }

    /// Number of selections that were omitted because they are in blocks of the MTP head.
    pub fn n_mtp_selections(&self) -> u64 {
        self.n_mtp_selections
    }

    fn is_of_mtp_head(&self, layer_id: LayerId) -> bool {
        let blocks = self.model_info.mtp_head();
        blocks.is_some_and(|blocks| blocks.contains(&layer_id.0.into()))
    }

    /// Sizes of all experts according to the trace; empty if it does not contain them.
    pub fn recorded_sizes(&self) -> ExpertSizes {
        let n_expert = self.model_info.n_expert.unwrap_or(0).max(self.n_expert);
        let layers = self.model_info.expert_bytes.iter();
        layers
            .filter(|&(&layer, _)| !self.is_of_mtp_head(layer))
            .flat_map(|(&layer, &bytes)| (0..n_expert).map(move |e| (layer, ExpertId(e), bytes)))
            .collect()
    }

    /// Batches of a model whose experts have these sizes.
    ///
    /// # Errors
    /// [`Error::NoSize`] if a selected expert has no size. [`Error::TooLong`] if the trace has too many selections.
    pub fn finish(mut self, sizes: &ExpertSizes) -> Result<Batches, Error> {
        self.close().map_err(|_| Error::TooLong)?;
        let experts = Experts::new(sizes);
        for selection in &mut self.selections {
            let layer = LayerId((*selection >> EXPERT_BITS) as u16); // below MAX_ID, as in every row
            let expert = ExpertId(*selection & (MAX_ID - 1));
            let key = experts.key(layer, expert);
            *selection = key.ok_or(Error::NoSize { layer, expert })?;
        }
        let properties = TraceProperties {
            windows_s: self.windows.seconds(&experts),
            n_expert_used: self.n_expert_used.max(1),
        };
        Ok(Batches::new(
            Arc::new(experts),
            self.selections,
            self.ends,
            self.phases,
            properties,
        ))
    }

    /// Ends the current batch.
    fn close(&mut self) -> Result<(), SinkError> {
        match self.open.take() {
            None => {}
            Some(Group::Prompt(_)) => {
                for (_, selections) in self.prompt.layers.drain(..) {
                    self.selections.extend(selections);
                    self.ends.push(end(&self.selections)?);
                    self.phases.push(0);
                }
            }
            Some(_) => self.ends.push(end(&self.selections)?),
        }
        Ok(())
    }
}

fn end(selections: &[u32]) -> Result<u32, SinkError> {
    u32::try_from(selections.len()).map_err(|_| {
        SinkError::Refused(
            "the trace has more than 2^32 - 1 selections; split it into parts".into(),
        )
    })
}

impl Sink for Collector {
    fn model_info(&mut self, model_info: &ModelInfo) -> Result<(), SinkError> {
        self.model_info = model_info.clone();
        Ok(())
    }

    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        if self.is_of_mtp_head(row.layer_id) {
            self.n_mtp_selections += 1;
            return Ok(());
        }
        let phase = row.phase.map_or(UNKNOWN_PHASE, Phase::number);
        let group = match (row.timestamp_ns, row.phase) {
            (Some(time), _) => Group::Operation(row.layer_id, time),
            (None, Some(Phase::Prompt)) => Group::Prompt(row.sequence_id),
            (None, _) => Group::Token,
        };
        self.n_expert = self.n_expert.max(row.expert_id.0.saturating_add(1));
        self.n_expert_used = self.n_expert_used.max(u32::from(row.slot) + 1);
        let selection = u32::from(row.layer_id.0) << EXPERT_BITS | row.expert_id.0;
        let is_token_start = self.tokens.is_start(row.token(), row.slot.into());
        if self.open != Some(group) || group == Group::Token && is_token_start {
            self.close()?;
            self.open = Some(group);
            if !matches!(group, Group::Prompt(_)) {
                self.phases.push(phase);
            }
            let is_generated = row.phase == Some(Phase::Generate);
            let time_ns = row.timestamp_ns.filter(|_| is_generated);
            self.windows.add(row.layer_id, time_ns);
        }
        match group {
            Group::Prompt(_) => self.prompt.push(row.layer_id, selection),
            _ => self.selections.push(selection),
        }
        Ok(())
    }

    fn count(&mut self, _row: &CountRow) -> Result<(), SinkError> {
        Err(SinkError::NeedsOrder)
    }
}
