//! The counter of selected experts that all readers share.

use std::path::Path;

use moe_placement::learn::LayerCounts;
use moe_trace::manifest::Model;
use moe_trace::{ExpertId, LayerId, MAX_ID, ModelInfo, Phase, TokenId, TokenKey, TokenStarts};

use super::origin::Origin;
use super::{Error, Hotness, LayerPhase, Number};
use crate::phases::ByPhase;
use crate::survey::SelectedExpert;
use crate::tally::ExpertTally;

/// Numbers of experts of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    n_expert: u32,
    n_expert_used: u32,
}

impl Shape {
    /// Numbers of experts in a manifest; `None` if it does not contain them.
    fn of(model: &Model, location: &Path) -> Result<Option<Shape>, Error> {
        let Model {
            n_expert,
            n_expert_used,
            ..
        } = *model;
        if let Some(source) = ModelInfo::from_manifest(model).invalid() {
            return Err(Error::InvalidModel {
                location: location.display().to_string(),
                source,
            });
        }
        Ok((n_expert > 0 && n_expert_used > 0).then_some(Shape {
            n_expert,
            n_expert_used,
        }))
    }
}

/// Counts selected experts. Add them in the order of the passes, the experts of a token one after another.
pub(super) struct Counter {
    shape: Option<Shape>,
    origin: Origin,
    /// Highest slot plus 1.
    n_slot: u32,
    /// Whether all selections so far have a router weight.
    pub has_mass: bool,
    /// Selections of an expert that the same token selected before.
    n_repeated: u64,
    /// See [`Hotness::n_backward`].
    n_backward: u64,
    /// Selections that were read as counts.
    n_counted: u64,
    /// `[n_layer]`
    layers: Vec<ByPhase<LayerPhase>>,
    /// `[n_layer]`
    progress: Vec<Progress>,
}

/// A pass of one layer over a batch of tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LayerPass {
    pub layer: LayerId,
    /// See [`SelectedExpert::phase`].
    pub phase: Option<Phase>,
    /// See [`SelectedExpert::timestamp_ns`].
    pub timestamp_ns: u64,
}

/// One selected expert in a pass of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Selection {
    /// Sequence of the token, if it is known.
    pub sequence_id: Option<u32>,
    /// Position of the token in its sequence.
    pub token_id: TokenId,
    /// Rank in the token's top-k, from 0.
    pub slot: u32,
    /// Expert id within the layer.
    pub expert: ExpertId,
    /// Router weight as applied, if it is known.
    pub weight: Option<f64>,
}

/// Position of a layer in the trace.
#[derive(Debug, Clone, Default)]
struct Progress {
    /// Timestamp and phase of the first selection.
    first: Option<(u64, Option<Phase>)>,
    /// Timestamp of the last pass.
    last_pass: u64,
    starts: TokenStarts,
    /// Number of tokens so far.
    token: u64,
    /// `[up to n_expert]`: the last token that selected each expert, from 1.
    last_token: Vec<u64>,
}

impl Counter {
    /// A counter for the model in `origin`. `location` names the input in errors.
    ///
    /// # Errors
    /// [`Error::InvalidModel`] if the model has more layers or experts than any model.
    pub fn new(origin: Origin, location: &Path) -> Result<Counter, Error> {
        let model = origin.model();
        let shape = model.map(|model| Shape::of(model, location)).transpose()?;
        Ok(Counter {
            shape: shape.flatten(),
            ..Counter::without_shape(origin)
        })
    }

    /// A counter for a model whose numbers of experts are unknown until the end.
    pub fn without_shape(origin: Origin) -> Counter {
        Counter {
            shape: None,
            origin,
            n_slot: 0,
            has_mass: true,
            n_repeated: 0,
            n_backward: 0,
            n_counted: 0,
            layers: Vec::new(),
            progress: Vec::new(),
        }
    }

    /// Counts one selected expert. `location` names its position in the input, for errors.
    #[inline]
    pub fn add(
        &mut self,
        selected: &SelectedExpert,
        location: impl Fn() -> String,
    ) -> Result<(), Error> {
        let pass = LayerPass {
            layer: selected.layer,
            phase: selected.phase,
            timestamp_ns: selected.timestamp_ns,
        };
        let selection = Selection {
            sequence_id: selected.sequence_id,
            token_id: selected.token_id,
            slot: selected.slot,
            expert: selected.expert,
            weight: selected.weight,
        };
        self.add_all(pass, [selection], location)
    }

    /// Counts selected experts of one pass of a layer. `location` names their position in the input, for errors.
    #[inline]
    pub fn add_all(
        &mut self,
        pass: LayerPass,
        selections: impl IntoIterator<Item = Selection>,
        location: impl Fn() -> String,
    ) -> Result<(), Error> {
        let check = |what, id: u32, limit: u32| {
            if id < limit {
                return Ok(());
            }
            Err(Error::Id {
                what,
                id,
                limit,
                location: location(),
            })
        };
        check("layer", pass.layer.0.into(), MAX_ID)?;
        let n_expert = self.shape.map_or(MAX_ID, |shape| shape.n_expert);

        self.make_room(pass.layer.index());
        let layer = pass.layer.index();
        let phase = &mut self.layers[layer][pass.phase];
        let progress = &mut self.progress[layer];
        progress
            .first
            .get_or_insert((pass.timestamp_ns, pass.phase));
        if progress.last_pass != pass.timestamp_ns {
            self.n_backward += u64::from(progress.is_after(pass.timestamp_ns));
            progress.last_pass = pass.timestamp_ns;
            phase.calls += 1;
        }
        for selection in selections {
            let expert = selection.expert;
            check("expert", expert.0, n_expert)?;
            let token = TokenKey {
                layer_id: pass.layer,
                sequence_id: selection.sequence_id,
                token_id: selection.token_id,
                phase: pass.phase,
                timestamp_ns: pass.timestamp_ns,
            };
            if progress.starts.is_start(token, selection.slot) {
                phase.tokens += 1;
                progress.token += 1;
            }
            self.n_slot = self.n_slot.max(selection.slot + 1);
            self.n_repeated += u64::from(progress.is_repeated(expert.index()));
            let tally = phase.expert(expert.index());
            tally.count += 1;
            tally.mass += selection.weight.unwrap_or(0.0);
            self.has_mass &= selection.weight.is_some();
        }
        Ok(())
    }

    /// Adds the counts of the following part of the same run.
    pub fn append(&mut self, later: Counter) {
        self.n_slot = self.n_slot.max(later.n_slot);
        self.has_mass &= later.has_mass;
        self.n_repeated += later.n_repeated;
        self.n_backward += later.n_backward;
        if let Some(last) = later.layers.len().checked_sub(1) {
            self.make_room(last);
        }
        for (phase, more) in self
            .layers
            .iter_mut()
            .flat_map(ByPhase::iter_mut)
            .zip(later.layers.iter().flat_map(ByPhase::iter))
        {
            phase.add(more);
        }
        for (layer, (progress, later)) in self.progress.iter_mut().zip(later.progress).enumerate() {
            if let Some((timestamp_ns, phase)) = later.first {
                self.n_backward += u64::from(progress.is_after(timestamp_ns));
                // Both parts counted a pass, or a token, that spans the border.
                if timestamp_ns != 0 && timestamp_ns == progress.last_pass {
                    self.layers[layer][phase].calls -= 1;
                }
                if progress.starts.append(later.starts) {
                    self.layers[layer][phase].tokens -= 1;
                }
                progress.first.get_or_insert((timestamp_ns, phase));
                progress.last_pass = later.last_pass;
            }
        }
    }

    /// Adds a count of one layer and phase, whose ids must be in range. Returns `None` and adds nothing if the sum of all
    /// counts would exceed 64 bits. Sums of subsets therefore cannot overflow.
    #[must_use]
    pub fn add_counts(
        &mut self,
        layer: LayerId,
        phase: Option<Phase>,
        expert: ExpertId,
        tally: ExpertTally,
    ) -> Option<()> {
        self.n_counted = self.n_counted.checked_add(tally.count)?;
        self.make_room(layer.index());
        let sum = self.layers[layer.index()][phase].expert(expert.index());
        sum.count += tally.count;
        sum.mass += tally.mass;
        Some(())
    }

    /// Adds passes and tokens of one layer and phase, whose ids must be in range.
    pub fn add_totals(&mut self, layer: LayerId, phase: Option<Phase>, calls: u64, tokens: u64) {
        self.make_room(layer.index());
        let sum = &mut self.layers[layer.index()][phase];
        sum.calls = sum.calls.saturating_add(calls);
        sum.tokens = sum.tokens.saturating_add(tokens);
    }

    fn make_room(&mut self, layer: usize) {
        let n_layer = layer + 1;
        if self.layers.len() < n_layer {
            self.layers.resize(n_layer, Default::default());
            self.progress.resize(n_layer, Progress::default());
        }
    }

    /// The sums of a trace of another tool with the known `model_info`; `None` if nothing was counted. Unknown numbers of tokens
    /// are derived from the selections and the experts per token.
    pub fn finish_foreign(mut self, origin: Origin, model_info: &ModelInfo) -> Option<Hotness> {
        for (layer, phases) in (0..).map(LayerId).zip(&mut self.layers) {
            let used = model_info.n_expert_used_in(layer).unwrap_or(0);
            for phase in phases.iter_mut() {
                if phase.tokens == 0 {
                    phase.tokens = LayerCounts::tokens_of(phase.selections(), used);
                }
            }
        }
        let seen = Some(self.n_slot).filter(|&n| n > 0);
        self.origin = origin;
        self.shape = None;
        let mut hotness = self.finish()?;
        if let Some(n_expert) = model_info.n_expert {
            hotness.n_expert = Number::Stated(n_expert);
        }
        hotness.n_expert_used = match model_info.n_expert_used {
            Some(used) => Number::Stated(used),
            None => Number::Seen(seen.or_else(|| model_info.max_expert_used()).unwrap_or(0)),
        };
        Some(hotness)
    }

    /// The sums; `None` if nothing was counted.
    pub fn finish(mut self) -> Option<Hotness> {
        let experts = self
            .layers
            .iter()
            .flat_map(ByPhase::iter)
            .map(|phase| phase.experts.len() as u32);
        let seen = experts.max().filter(|&experts| experts > 0)?;
        for phase in self.layers.iter_mut().flat_map(ByPhase::iter_mut) {
            let selections = phase.selections();
            if phase.calls == 0 && selections > 0 {
                phase.assumed_calls = LayerCounts::calls_without_passes(phase.tokens, selections);
            }
        }
        let (n_expert, n_expert_used) = match self.shape {
            Some(shape) => (
                Number::Stated(shape.n_expert),
                Number::Stated(shape.n_expert_used),
            ),
            None => (Number::Seen(seen), Number::Seen(self.n_slot)),
        };
        Some(Hotness {
            n_expert,
            n_expert_used,
            has_mass: self.has_mass,
            n_repeated: self.n_repeated,
            n_backward: self.n_backward,
            layers: self.layers,
            origins: vec![self.origin],
        })
    }
}

impl Progress {
    /// Whether the last pass started after `timestamp_ns`, which is 0 if unknown.
    fn is_after(&self, timestamp_ns: u64) -> bool {
        timestamp_ns != 0 && timestamp_ns < self.last_pass
    }

    /// Records the selection of an expert; returns whether the current token selected it before.
    #[inline]
    fn is_repeated(&mut self, expert: usize) -> bool {
        if self.last_token.len() <= expert {
            self.last_token.resize(expert + 1, 0);
        }
        std::mem::replace(&mut self.last_token[expert], self.token) == self.token
    }
}
