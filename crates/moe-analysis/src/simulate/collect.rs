//! Rows of a trace, put into batches.
//!
//! Where a trace has times, a batch is an operation: what has the same layer and time. Where it has none, a prompt is one
//! batch for each layer, in whatever order its rows come, and any other token is a batch of its own.

use std::sync::Arc;

use moe_placement::cache::Experts;
use moe_placement::plan::ExpertSizes;
use moe_trace::{
    CountRow, ExpertId, Facts, LayerId, MAX_ID, Phase, RoutingRow, Sink, SinkError, TokenStarts,
};

use super::batches::TraceFacts;
use super::windows::Windows;
use super::{Batches, Error};

/// Bits of an expert id in a raw choice, the layer is above.
const EXPERT_BITS: u32 = MAX_ID.trailing_zeros();

/// Index of tokens of which it is not told whether they are of the prompt.
const UNKNOWN_PHASE: u8 = 2;

/// Takes rows of routing and refuses counts. Blocks of an MTP head, which no cache of the model's layers has, are left out.
#[derive(Debug, Default)]
pub struct Collector {
    /// Layer and expert of each choice.
    choices: Vec<u32>,
    ends: Vec<u32>,
    phases: Vec<u8>,
    open: Option<Group>,
    tokens: TokenStarts,
    prompt: Prompt,
    n_expert: u32,
    /// One more than the highest slot.
    n_expert_used: u32,
    facts: Facts,
    /// Selections in blocks of the MTP head.
    n_of_mtp_head: u64,
    windows: Windows,
}

/// What the rows of a batch have in common.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Group {
    Operation(LayerId, u64),
    /// One token without a time; there is another group for each token.
    Token,
    /// A prompt without times, of a sequence.
    Prompt(Option<u32>),
}

/// A prompt without times, until it ends.
#[derive(Debug, Default)]
struct Prompt {
    /// Choices of each layer, in the order in which layers are first met.
    layers: Vec<(LayerId, Vec<u32>)>,
}

impl Prompt {
    fn push(&mut self, layer_id: LayerId, choice: u32) {
        // Rows of a layer come together, or layers ascend: it is the last one or near it.
        let place = self
            .layers
            .iter()
            .rposition(|(layer, _)| *layer == layer_id);
        match place {
            Some(place) => self.layers[place].1.push(choice),
            None => self.layers.push((layer_id, vec![choice])),
        }
    }
}

impl Collector {
    /// No rows yet.
    pub fn new() -> Collector {
        Collector::default()
    }

    /// Selections that were left out, as they are in blocks of the MTP head.
    pub fn n_of_mtp_head(&self) -> u64 {
        self.n_of_mtp_head
    }

    fn is_of_mtp_head(&self, layer_id: LayerId) -> bool {
        let blocks = self.facts.mtp_head();
        blocks.is_some_and(|blocks| blocks.contains(&layer_id.0.into()))
    }

    /// Sizes of all experts by what the trace tells of its layers; none where it does not tell.
    pub fn stated_sizes(&self) -> ExpertSizes {
        let n_expert = self.facts.n_expert.unwrap_or(0).max(self.n_expert);
        let layers = self.facts.expert_bytes.iter();
        layers
            .filter(|&(&layer, _)| !self.is_of_mtp_head(layer))
            .flat_map(|(&layer, &bytes)| (0..n_expert).map(move |e| (layer, ExpertId(e), bytes)))
            .collect()
    }

    /// The batches of a model whose experts have these sizes.
    ///
    /// # Errors
    /// [`Error::NoSize`] if an expert was chosen that has none.
    pub fn finish(mut self, sizes: &ExpertSizes) -> Result<Batches, Error> {
        self.close().map_err(|_| Error::TooLong)?;
        let experts = Experts::new(sizes);
        for choice in &mut self.choices {
            let layer = LayerId((*choice >> EXPERT_BITS) as u16); // below MAX_ID, as in every row
            let expert = ExpertId(*choice & (MAX_ID - 1));
            let key = experts.key(layer, expert);
            *choice = key.ok_or(Error::NoSize { layer, expert })?;
        }
        let facts = TraceFacts {
            windows_s: self.windows.seconds(&experts),
            n_expert_used: self.n_expert_used.max(1),
        };
        Ok(Batches::new(
            Arc::new(experts),
            self.choices,
            self.ends,
            self.phases,
            facts,
        ))
    }

    /// Ends the open batch.
    fn close(&mut self) -> Result<(), SinkError> {
        match self.open.take() {
            None => {}
            Some(Group::Prompt(_)) => {
                for (_, choices) in self.prompt.layers.drain(..) {
                    self.choices.extend(choices);
                    self.ends.push(end(&self.choices)?);
                    self.phases.push(0);
                }
            }
            Some(_) => self.ends.push(end(&self.choices)?),
        }
        Ok(())
    }
}

fn end(choices: &[u32]) -> Result<u32, SinkError> {
    u32::try_from(choices.len()).map_err(|_| {
        SinkError::Refused("more choices than can be simulated at once; cut the trace".into())
    })
}

impl Sink for Collector {
    fn facts(&mut self, facts: &Facts) -> Result<(), SinkError> {
        self.facts = facts.clone();
        Ok(())
    }

    fn routing(&mut self, row: &RoutingRow) -> Result<(), SinkError> {
        if self.is_of_mtp_head(row.layer_id) {
            self.n_of_mtp_head += 1;
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
        let choice = u32::from(row.layer_id.0) << EXPERT_BITS | row.expert_id.0;
        let is_token_start = self.tokens.is_start(row.token(), row.slot.into());
        if self.open != Some(group) || group == Group::Token && is_token_start {
            self.close()?;
            self.open = Some(group);
            if !matches!(group, Group::Prompt(_)) {
                self.phases.push(phase);
            }
            let is_generated = row.phase == Some(Phase::Generate);
            let time_ns = row.timestamp_ns.filter(|_| is_generated);
            self.windows.note(row.layer_id, time_ns);
        }
        match group {
            Group::Prompt(_) => self.prompt.push(row.layer_id, choice),
            _ => self.choices.push(choice),
        }
        Ok(())
    }

    fn count(&mut self, _row: &CountRow) -> Result<(), SinkError> {
        Err(SinkError::NeedsOrder)
    }
}
