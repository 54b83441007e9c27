//! What a trace contains beyond its sums: the order of its tokens, their sequences and domains.
//!
//! A [`Survey`] is fed by the readers of [`crate::hotness`], choice by choice, in one pass. Its memory does not grow with the
//! trace: time is cut into windows that become longer as the trace does.

mod distinct;
mod groups;
mod labels;
mod order;
mod windows;

use std::collections::HashMap;

use moe_trace::{ExpertId, LayerId, Phase, TokenId, TokenKey, TokenStarts};

use crate::hotness::{ExpertTally, Phases};

pub use distinct::{BATCHES, Distinct};
pub use groups::Groups;
pub use labels::{LabelFault, Labels};
pub use order::TokenPairs;
pub use windows::Windows;

/// Sequences are dealt into so many folds to learn on the others of, at most.
pub const MAX_FOLDS: usize = 16;

/// Why a survey has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// More parts than fit in memory.
    #[error(
        "{n} parts (split by {by}) of the matrix so far are too many to hold; choose longer windows, or split by label"
    )]
    TooManyParts {
        /// `sequence`, `window` or the like.
        by: &'static str,
        /// Parts that were there.
        n: usize,
    },
    /// The input holds sums alone.
    #[error("{what} needs the order of the tokens, and the input holds counts alone; give a trace")]
    NoOrder {
        /// What was asked for.
        what: &'static str,
    },
    /// Nothing to learn on or to test on.
    #[error("{what}: there is only one {part}, and at least two are needed")]
    OnePart {
        /// What was asked for.
        what: &'static str,
        /// `sequence`, `label` or the like.
        part: &'static str,
    },
    /// A file of labels that makes no sense.
    #[error("line {line}: {fault}; write lines `sequence,label`")]
    Labels {
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        #[source]
        fault: LabelFault,
    },
}

/// One expert of one token in one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SelectedExpert {
    /// Block number.
    pub layer: LayerId,
    /// Phase, if it is known.
    pub phase: Option<Phase>,
    /// Distinguishes the passes of a layer; 0 = unknown, then they are not counted.
    pub timestamp_ns: u64,
    /// Position of the token in its sequence.
    pub token_id: TokenId,
    /// Sequence of the token, where it is known.
    pub sequence_id: Option<u32>,
    /// Rank in the token's top-k.
    pub slot: u32,
    /// Expert in the layer.
    pub expert: ExpertId,
    /// Router weight as applied, where it is known.
    pub weight: Option<f64>,
}

impl SelectedExpert {
    /// The token in its layer.
    pub fn token(&self) -> TokenKey {
        TokenKey {
            layer_id: self.layer,
            sequence_id: self.sequence_id,
            token_id: self.token_id,
            phase: self.phase,
            timestamp_ns: self.timestamp_ns,
        }
    }
}

/// By what a matrix is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupBy {
    /// Prompt and generated tokens.
    Phase,
    /// Sequences (requests).
    Sequence,
    /// So many tokens of a layer, in the order of the trace.
    Window(u64),
    /// Domains, as the user labels them.
    Label,
}

impl GroupBy {
    /// What a part is called.
    pub fn name(self) -> &'static str {
        match self {
            GroupBy::Phase => "phase",
            GroupBy::Sequence => "sequence",
            GroupBy::Window(_) => "window",
            GroupBy::Label => "label",
        }
    }
}

/// What to look at.
#[derive(Debug, Clone, Default)]
pub struct SurveyOptions {
    /// Tokens that count; all by default.
    pub phases: Phases,
    /// Split the matrix.
    pub group_by: Option<GroupBy>,
    /// Deal sequences into folds.
    pub folds: bool,
    /// Domains of inputs and sequences.
    pub labels: Labels,
}

/// A token in a layer, while its choices come in.
#[derive(Debug, Default)]
struct Token {
    layer: LayerId,
    phase: Option<Phase>,
    /// Run, and sequence in it; tokens of no known sequence are of none of the others.
    sequence: (usize, Option<u32>),
    token_id: TokenId,
    /// (expert, weight), best first
    experts: Vec<(ExpertId, f64)>,
    /// Experts of slots 0 and 1; a trace may lack them, for example the dump of one expert-parallel rank.
    top_two: [Option<ExpertId>; 2],
}

/// What is known of a layer from the order of its tokens.
#[derive(Debug, Clone, Default)]
struct LayerSurvey {
    rows: u64,
    order: TokenPairs,
    distinct: Distinct,
}

/// The survey of one or several inputs of one model.
#[derive(Debug, Default)]
pub struct Survey {
    options: SurveyOptions,
    /// Inputs begun.
    n_inputs: usize,
    /// Runs begun: a dataset holds several.
    n_runs: usize,
    token: Token,
    starts: TokenStarts,
    layers: Vec<LayerSurvey>,
    windows: Windows,
    /// (run, sequence) → in the order of their coming
    sequences: HashMap<(usize, Option<u32>), usize>,
    last_sequence: Option<((usize, Option<u32>), usize)>,
    by_group: Groups,
    by_fold: Groups,
    by_label: Groups,
    has_counts: bool,
    failure: Option<Error>,
}

impl Survey {
    /// A survey of nothing yet.
    pub fn new(options: SurveyOptions) -> Survey {
        Survey {
            options,
            ..Survey::default()
        }
    }

    /// The next choices are of another input.
    pub fn begin_input(&mut self) {
        self.flush();
        self.n_inputs += 1;
    }

    /// The next choices are of another run: its sequences are others, whatever their numbers.
    pub(crate) fn begin_run(&mut self) {
        self.flush();
        self.n_runs += 1;
    }

    /// Takes a choice whose ids are in range. A layer's tokens come in the order of the trace, a token's experts by slot.
    pub(crate) fn choice(&mut self, choice: &SelectedExpert) {
        if !self.options.phases.has(choice.phase) {
            return;
        }
        let is_start = self.starts.is_start(choice.token(), choice.slot);
        if is_start || self.token.experts.is_empty() {
            self.flush();
            self.token.layer = choice.layer;
            self.token.phase = choice.phase;
            self.token.sequence = (self.n_runs, choice.sequence_id);
            self.token.token_id = choice.token_id;
            self.token.top_two = [None; 2];
        }
        let weight = choice.weight.unwrap_or(0.0);
        self.token.experts.push((choice.expert, weight));
        if let Some(expert) = self.token.top_two.get_mut(choice.slot as usize) {
            *expert = Some(choice.expert);
        }
    }

    /// Takes a count of a trace without order, whose ids are in range.
    pub(crate) fn count(
        &mut self,
        layer: LayerId,
        phase: Option<Phase>,
        expert: ExpertId,
        tally: ExpertTally,
    ) {
        if !self.options.phases.has(phase) {
            return;
        }
        self.has_counts = true;
        let label = self.options.labels.of(self.n_inputs, None);
        let added = self.by_label.add_count(label, layer, expert, tally);
        self.note(added, GroupBy::Label);
        match self.options.group_by {
            Some(GroupBy::Phase) => {
                let added = self
                    .by_group
                    .add_count(phase_name(phase), layer, expert, tally);
                self.note(added, GroupBy::Phase);
            }
            Some(GroupBy::Label) | None => {}
            Some(by) => self.fail(Error::NoOrder {
                what: match by {
                    GroupBy::Window(_) => "a matrix for each window of time",
                    _ => "a matrix for each sequence",
                },
            }),
        }
    }

    /// Takes the token that was being put together.
    fn flush(&mut self) {
        if self.token.experts.is_empty() {
            return;
        }
        let mut token = std::mem::take(&mut self.token);
        self.take(&token);
        // Its vector is used again.
        token.experts.clear();
        self.token = token;
    }

    fn take(&mut self, token: &Token) {
        let index = token.layer.index();
        if self.layers.len() <= index {
            self.layers.resize_with(index + 1, LayerSurvey::default);
        }
        let layer = &mut self.layers[index];
        let row = layer.rows;
        layer.rows += 1;
        layer.order.add(
            token.sequence,
            token.token_id,
            &token.experts,
            token.top_two,
        );
        layer.distinct.add(row, &token.experts);
        self.windows.add(index, row, &token.experts);

        if self.options.folds {
            let fold = self.ordinal(token.sequence) % MAX_FOLDS;
            let added = self
                .by_fold
                .add(&fold.to_string(), token.layer, &token.experts);
            self.note(added, GroupBy::Sequence);
        }
        if !self.options.labels.is_empty() {
            let label = self.options.labels.of(self.n_inputs, token.sequence.1);
            let added = self.by_label.add(label, token.layer, &token.experts);
            self.note(added, GroupBy::Label);
        }
        let Some(by) = self.options.group_by else {
            return;
        };
        let name = match by {
            GroupBy::Phase => phase_name(token.phase).to_owned(),
            GroupBy::Window(size) => (row / size.max(1)).to_string(),
            GroupBy::Label => return,
            GroupBy::Sequence => {
                let (run, sequence) = token.sequence;
                let name = sequence.map_or(UNKNOWN.to_owned(), |sequence| sequence.to_string());
                if self.n_runs > 1 {
                    format!("{}/{name}", run - 1)
                } else {
                    name
                }
            }
        };
        let added = self.by_group.add(&name, token.layer, &token.experts);
        self.note(added, by);
    }

    /// Number of a sequence in the order of their coming.
    fn ordinal(&mut self, sequence: (usize, Option<u32>)) -> usize {
        if let Some((last, ordinal)) = self.last_sequence
            && last == sequence
        {
            return ordinal;
        }
        let next = self.sequences.len();
        let ordinal = *self.sequences.entry(sequence).or_insert(next);
        self.last_sequence = Some((sequence, ordinal));
        ordinal
    }

    fn note(&mut self, added: Result<(), usize>, by: GroupBy) {
        if let Err(n) = added {
            let by = by.name();
            self.fail(Error::TooManyParts { by, n });
        }
    }

    /// Keeps the first failure, which is returned when its result is asked for.
    fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }

    /// Takes what is left at the end of the last input.
    ///
    /// # Errors
    /// A matrix that was asked for is too large, or cannot be had without order.
    pub fn finish(&mut self) -> Result<(), Error> {
        self.flush();
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Whether there are tokens in order: not counts alone.
    pub fn is_ordered(&self) -> bool {
        !self.has_counts && self.tokens() > 0
    }

    /// Tokens of the layer that routed most.
    pub fn tokens(&self) -> u64 {
        self.layers
            .iter()
            .map(|layer| layer.rows)
            .max()
            .unwrap_or(0)
    }

    /// Sequences that the user labelled and that no token was of, ascending.
    pub fn unused_labels(&self) -> Vec<u32> {
        self.options.labels.unused()
    }

    /// Sequences, as far as folds were asked for.
    pub fn n_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Layers that routed something, ascending.
    pub fn layers(&self) -> Vec<LayerId> {
        let layers = (0..).map(LayerId).zip(&self.layers);
        let used = layers.filter(|(_, layer)| layer.rows > 0);
        used.map(|(number, _)| number).collect()
    }

    /// Tokens that a layer routed.
    pub fn rows(&self, layer: LayerId) -> u64 {
        self.layer(layer).map_or(0, |layer| layer.rows)
    }

    /// Consecutive tokens of a layer.
    pub fn order(&self, layer: LayerId) -> Option<&TokenPairs> {
        self.layer(layer).map(|layer| &layer.order)
    }

    /// Distinct experts of batches of a layer.
    pub fn distinct(&self, layer: LayerId) -> Option<&Distinct> {
        self.layer(layer).map(|layer| &layer.distinct)
    }

    /// Counts in windows of time.
    pub fn windows(&self) -> &Windows {
        &self.windows
    }

    /// The parts that [`SurveyOptions::group_by`] asked for.
    pub fn groups(&self) -> &Groups {
        match self.options.group_by {
            Some(GroupBy::Label) => &self.by_label,
            _ => &self.by_group,
        }
    }

    /// Folds of sequences, if they were asked for.
    pub fn folds(&self) -> &Groups {
        &self.by_fold
    }

    /// Domains, if there are labels.
    pub fn labels(&self) -> &Groups {
        &self.by_label
    }

    fn layer(&self, layer: LayerId) -> Option<&LayerSurvey> {
        self.layers.get(layer.index())
    }
}

/// Name of the tokens of [`GroupBy::Sequence`] whose sequence is not known.
const UNKNOWN: &str = "unknown";

/// Name of a part of [`GroupBy::Phase`].
fn phase_name(phase: Option<Phase>) -> &'static str {
    match phase {
        Some(Phase::Prompt) => "prompt",
        Some(Phase::Generate) => "generate",
        None => "untold",
    }
}
