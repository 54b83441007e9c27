//! Surveys: properties of a trace that depend on the order, sequences and domains of its tokens.
//!
//! The readers of [`crate::hotness`] feed a [`Survey`] with each selected expert in one pass. Its memory does not grow with
//! the trace: it divides time into windows, whose length doubles as the trace grows.

mod distinct;
mod groups;
mod labels;
mod order;
mod windows;

use std::collections::HashMap;

use moe_trace::{ExpertId, LayerId, Phase, TokenId, TokenKey, TokenStarts};

use crate::phases::Phases;
use crate::tally::ExpertTally;

pub use distinct::{BATCHES, Distinct};
pub use groups::Groups;
pub use labels::{LabelFault, Labels};
pub use order::TokenPairs;
pub use windows::Windows;

/// Maximum number of folds into which sequences are divided for cross-validation.
pub const MAX_FOLDS: usize = 16;

/// Reason why a survey has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The groups do not fit in memory.
    #[error(
        "grouping by {} exceeds the limit after {n} groups; use longer windows, or group by label", by.name()
    )]
    TooManyParts {
        /// Kind of group.
        by: GroupBy,
        /// Number of groups before the limit was exceeded.
        n: usize,
    },
    /// The input contains only counts.
    #[error("grouping by {} needs the order of the tokens, but the input contains only counts; use a trace of tokens", by.name())]
    NoOrder {
        /// Kind of group.
        by: GroupBy,
    },
    /// There is only one group, so that no training split or no held-out split exists.
    #[error("the input contains only one {part}; a split needs at least two")]
    OnePart {
        /// Kind of group: `sequence` or `label`.
        part: &'static str,
    },
    /// A file of labels is invalid.
    #[error("line {line}: {fault}; each line must be `sequence,label`")]
    Labels {
        /// Line, from 1.
        line: usize,
        /// The fault in the line.
        #[source]
        fault: LabelFault,
    },
}

/// A selected expert: one expert of one token in one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SelectedExpert {
    /// Block number.
    pub layer: LayerId,
    /// Phase, if it is known.
    pub phase: Option<Phase>,
    /// Timestamp of the pass; distinguishes the passes of a layer. 0 if unknown; then passes are not counted.
    pub timestamp_ns: u64,
    /// Position of the token in its sequence.
    pub token_id: TokenId,
    /// Sequence of the token, if it is known.
    pub sequence_id: Option<u32>,
    /// Rank in the token's top-k, from 0.
    pub slot: u32,
    /// Expert id within the layer.
    pub expert: ExpertId,
    /// Router weight as applied, if it is known.
    pub weight: Option<f64>,
}

impl SelectedExpert {
    /// Key of the token in its layer.
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

/// Grouping of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupBy {
    /// Prompt and generated tokens.
    Phase,
    /// Sequences (requests).
    Sequence,
    /// Windows of N tokens of a layer, in the order of the trace.
    Window(u64),
    /// Labels from the user, for example domains.
    Label,
}

impl GroupBy {
    /// Name of the grouping.
    pub fn name(self) -> &'static str {
        match self {
            GroupBy::Phase => "phase",
            GroupBy::Sequence => "sequence",
            GroupBy::Window(_) => "window",
            GroupBy::Label => "label",
        }
    }
}

/// Options of a survey.
#[derive(Debug, Clone, Default)]
pub struct SurveyOptions {
    /// Phases to include; all by default.
    pub phases: Phases,
    /// Grouping of the matrix.
    pub group_by: Option<GroupBy>,
    /// Divide the sequences into up to [`MAX_FOLDS`] folds, for cross-validation.
    pub folds: bool,
    /// Labels of inputs and sequences.
    pub labels: Labels,
}

/// A token in a layer, while its experts are being collected.
#[derive(Debug, Default)]
struct Token {
    layer: LayerId,
    phase: Option<Phase>,
    /// Run, and sequence in it. An unknown sequence differs from all known ones.
    sequence: (usize, Option<u32>),
    token_id: TokenId,
    /// (expert, weight) in the order of the rows.
    experts: Vec<(ExpertId, f64)>,
    /// Experts of slots 0 and 1. A trace may lack them, for example the dump of one expert-parallel rank.
    top_two: [Option<ExpertId>; 2],
}

/// Survey of the ordered tokens of a layer.
#[derive(Debug, Clone, Default)]
struct LayerSurvey {
    tokens: u64,
    order: TokenPairs,
    distinct: Distinct,
}

/// Survey of one or several inputs of one model.
#[derive(Debug, Default)]
pub struct Survey {
    options: SurveyOptions,
    /// Number of inputs started.
    n_inputs: usize,
    /// Number of runs started. A dataset contains several runs.
    n_runs: usize,
    token: Token,
    starts: TokenStarts,
    layers: Vec<LayerSurvey>,
    windows: Windows,
    /// Index of each (run, sequence) in the order of first occurrence.
    sequences: HashMap<(usize, Option<u32>), usize>,
    last_sequence: Option<((usize, Option<u32>), usize)>,
    by_group: Groups,
    by_fold: Groups,
    by_label: Groups,
    has_counts: bool,
    failure: Option<Error>,
}

impl Survey {
    /// An empty survey.
    pub fn new(options: SurveyOptions) -> Survey {
        Survey {
            options,
            ..Survey::default()
        }
    }

    /// Starts the next input.
    pub fn begin_input(&mut self) {
        self.flush();
        self.n_inputs += 1;
    }

    /// Starts the next run. Its sequences differ from those of other runs even if their numbers are equal.
    pub(crate) fn begin_run(&mut self) {
        self.flush();
        self.n_runs += 1;
    }

    /// Adds a selected expert, whose ids must be in range. Add the tokens of a layer in the order of the trace. The experts of a
    /// token must follow each other, in any order of the slots.
    pub(crate) fn add_selection(&mut self, selected: &SelectedExpert) {
        if !self.options.phases.contains(selected.phase) {
            return;
        }
        let is_start = self.starts.is_start(selected.token(), selected.slot);
        if is_start || self.token.experts.is_empty() {
            self.flush();
            self.token.layer = selected.layer;
            self.token.phase = selected.phase;
            self.token.sequence = (self.n_runs, selected.sequence_id);
            self.token.token_id = selected.token_id;
            self.token.top_two = [None; 2];
        }
        let weight = selected.weight.unwrap_or(0.0);
        self.token.experts.push((selected.expert, weight));
        if let Some(expert) = self.token.top_two.get_mut(selected.slot as usize) {
            *expert = Some(selected.expert);
        }
    }

    /// Adds a count from a trace without token order. The ids must be in range.
    pub(crate) fn count(
        &mut self,
        layer: LayerId,
        phase: Option<Phase>,
        expert: ExpertId,
        tally: ExpertTally,
    ) {
        if !self.options.phases.contains(phase) {
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
            Some(by) => self.fail(Error::NoOrder { by }),
        }
    }

    /// Adds the collected token.
    fn flush(&mut self) {
        if self.token.experts.is_empty() {
            return;
        }
        let mut token = std::mem::take(&mut self.token);
        self.take(&token);
        // Keeps the memory of the vector.
        token.experts.clear();
        self.token = token;
    }

    fn take(&mut self, token: &Token) {
        let index = token.layer.index();
        if self.layers.len() <= index {
            self.layers.resize_with(index + 1, LayerSurvey::default);
        }
        let layer = &mut self.layers[index];
        let token_index = layer.tokens;
        layer.tokens += 1;
        layer.order.add(
            token.sequence,
            token.token_id,
            &token.experts,
            token.top_two,
        );
        layer.distinct.add(token_index, &token.experts);
        self.windows.add(index, token_index, &token.experts);

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
            GroupBy::Window(size) => (token_index / size.max(1)).to_string(),
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

    /// Index of a sequence in the order of first occurrence.
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
            self.fail(Error::TooManyParts { by, n });
        }
    }

    /// Keeps the first error, which [`finish`](Self::finish) returns.
    fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }

    /// Completes the survey after the last input.
    ///
    /// # Errors
    /// [`Error::TooManyParts`] if the groups do not fit in memory, [`Error::NoOrder`] if the grouping needs the token order.
    pub fn finish(&mut self) -> Result<(), Error> {
        self.flush();
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Whether the input contains tokens in order, not only counts.
    pub fn is_ordered(&self) -> bool {
        !self.has_counts && self.tokens() > 0
    }

    /// Number of tokens of the layer with the most tokens.
    pub fn tokens(&self) -> u64 {
        self.layers
            .iter()
            .map(|layer| layer.tokens)
            .max()
            .unwrap_or(0)
    }

    /// Labeled sequences without tokens, in ascending order.
    pub fn unused_labels(&self) -> Vec<u32> {
        self.options.labels.unused()
    }

    /// Number of sequences, if folds are enabled.
    pub fn n_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Layers with routed tokens, in ascending order.
    pub fn layers(&self) -> Vec<LayerId> {
        let layers = (0..).map(LayerId).zip(&self.layers);
        let used = layers.filter(|(_, layer)| layer.tokens > 0);
        used.map(|(number, _)| number).collect()
    }

    /// Number of tokens routed in a layer.
    pub fn routed_tokens(&self, layer: LayerId) -> u64 {
        self.layer(layer).map_or(0, |layer| layer.tokens)
    }

    /// Statistics of pairs of consecutive tokens in a layer.
    pub fn order(&self, layer: LayerId) -> Option<&TokenPairs> {
        self.layer(layer).map(|layer| &layer.order)
    }

    /// Numbers of distinct experts in batches of a layer.
    pub fn distinct(&self, layer: LayerId) -> Option<&Distinct> {
        self.layer(layer).map(|layer| &layer.distinct)
    }

    /// Counts in windows of tokens.
    pub fn windows(&self) -> &Windows {
        &self.windows
    }

    /// Groups by [`SurveyOptions::group_by`].
    pub fn groups(&self) -> &Groups {
        match self.options.group_by {
            Some(GroupBy::Label) => &self.by_label,
            _ => &self.by_group,
        }
    }

    /// Folds of sequences, if they are enabled.
    pub fn folds(&self) -> &Groups {
        &self.by_fold
    }

    /// Groups by label, if there are labels.
    pub fn labels(&self) -> &Groups {
        &self.by_label
    }

    fn layer(&self, layer: LayerId) -> Option<&LayerSurvey> {
        self.layers.get(layer.index())
    }
}

/// Name of the group of tokens whose sequence or phase is unknown.
const UNKNOWN: &str = "unknown";

/// Name of a group of [`GroupBy::Phase`].
fn phase_name(phase: Option<Phase>) -> &'static str {
    match phase {
        Some(Phase::Prompt) => "prompt",
        Some(Phase::Generate) => "generate",
        None => UNKNOWN,
    }
}
