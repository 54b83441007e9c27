//! The counter that both readers, of traces and of tables, feed.

use std::path::Path;

use moe_placement::learn::LayerCounts;
use moe_trace::manifest::Model;
use moe_trace::{ExpertId, Facts, LayerId, MAX_ID, Phase, TokenId, TokenKey, TokenStarts};

use super::origin::Origin;
use super::{ByPhase, Error, ExpertTally, Hotness, LayerPhase, Number};
use crate::survey::SelectedExpert;

/// What the model says of its experts; without a model, what is seen decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    n_expert: u32,
    n_expert_used: u32,
}

impl Shape {
    /// The shape of a recorded model, if its manifest has it.
    fn of(model: &Model, place: &Path) -> Result<Option<Shape>, Error> {
        let Model {
            n_expert,
            n_expert_used,
            ..
        } = *model;
        if let Some(source) = Facts::of_manifest(model).impossible() {
            return Err(Error::Impossible {
                place: place.display().to_string(),
                source,
            });
        }
        Ok((n_expert > 0 && n_expert_used > 0).then_some(Shape {
            n_expert,
            n_expert_used,
        }))
    }
}

/// Sums choices; they must come in the order of the passes, and a token's in the order of the slots.
pub(super) struct Counter {
    shape: Option<Shape>,
    origin: Origin,
    /// The highest slot seen, plus one.
    n_slot: u32,
    /// Whether all choices so far came with a router weight.
    pub has_mass: bool,
    /// Choices of an expert that its token has chosen before.
    n_repeated: u64,
    /// Choices that were read as counts.
    n_counted: u64,
    /// `[n_layer]`
    layers: Vec<ByPhase<LayerPhase>>,
    /// `[n_layer]`
    progress: Vec<Progress>,
}

/// One layer at work on a batch of tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LayerPass {
    pub layer: LayerId,
    /// As of [`SelectedExpert::phase`].
    pub phase: Option<Phase>,
    /// As of [`SelectedExpert::timestamp_ns`].
    pub timestamp_ns: u64,
}

/// One expert of one token in a pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chosen {
    /// Sequence of the token, if it is known.
    pub sequence_id: Option<u32>,
    /// Position of the token in its sequence.
    pub token_id: TokenId,
    /// Rank in the token's top-k.
    pub slot: u32,
    /// Expert in the layer.
    pub expert: ExpertId,
    /// Router weight as applied, if it is known.
    pub weight: Option<f64>,
}

/// Where a layer stands in the trace.
#[derive(Debug, Clone, Default)]
struct Progress {
    /// Timestamp and phase of its first choice.
    first: Option<(u64, Option<Phase>)>,
    /// Timestamp of the last pass seen.
    last_pass: u64,
    starts: TokenStarts,
    /// Tokens so far.
    token: u64,
    /// `[up to n_expert]`: the token that chose an expert last, counted from 1.
    chosen_by: Vec<u64>,
}

impl Counter {
    /// Begins to count what `origin` says is of its model; `place` is where it says so.
    ///
    /// # Errors
    /// [`Error::Impossible`] if no model has as many layers or experts.
    pub fn new(origin: Origin, place: &Path) -> Result<Counter, Error> {
        let model = origin.model();
        let shape = model.map(|model| Shape::of(model, place)).transpose()?;
        Ok(Counter {
            shape: shape.flatten(),
            ..Counter::without_shape(origin)
        })
    }

    /// Nothing counted, of a model that is known at the end or not at all.
    pub fn without_shape(origin: Origin) -> Counter {
        Counter {
            shape: None,
            origin,
            n_slot: 0,
            has_mass: true,
            n_repeated: 0,
            n_counted: 0,
            layers: Vec::new(),
            progress: Vec::new(),
        }
    }

    /// Counts one choice; `place` names where it was read, should it be impossible.
    #[inline]
    pub fn add(
        &mut self,
        choice: &SelectedExpert,
        place: impl Fn() -> String,
    ) -> Result<(), Error> {
        let pass = LayerPass {
            layer: choice.layer,
            phase: choice.phase,
            timestamp_ns: choice.timestamp_ns,
        };
        let chosen = Chosen {
            sequence_id: choice.sequence_id,
            token_id: choice.token_id,
            slot: choice.slot,
            expert: choice.expert,
            weight: choice.weight,
        };
        self.add_all(pass, [chosen], place)
    }

    /// Counts choices of one pass of a layer; `place` names where they were read, should one be impossible.
    #[inline]
    pub fn add_all(
        &mut self,
        pass: LayerPass,
        choices: impl IntoIterator<Item = Chosen>,
        place: impl Fn() -> String,
    ) -> Result<(), Error> {
        let check = |what, id: u32, limit: u32| {
            if id < limit {
                return Ok(());
            }
            Err(Error::Id {
                what,
                id,
                limit,
                place: place(),
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
            progress.last_pass = pass.timestamp_ns;
            phase.calls += 1;
        }
        for chosen in choices {
            let expert = chosen.expert;
            check("expert", expert.0, n_expert)?;
            let token = TokenKey {
                layer_id: pass.layer,
                sequence_id: chosen.sequence_id,
                token_id: chosen.token_id,
                phase: pass.phase,
                timestamp_ns: pass.timestamp_ns,
            };
            if progress.starts.is_start(token, chosen.slot) {
                phase.rows += 1;
                progress.token += 1;
            }
            self.n_slot = self.n_slot.max(chosen.slot + 1);
            self.n_repeated += u64::from(progress.is_repeated(expert.index()));
            let tally = phase.expert(expert.index());
            tally.count += 1;
            tally.mass += chosen.weight.unwrap_or(0.0);
            self.has_mass &= chosen.weight.is_some();
        }
        Ok(())
    }

    /// Adds what was counted from here on in the same run.
    pub fn append(&mut self, later: Counter) {
        self.n_slot = self.n_slot.max(later.n_slot);
        self.has_mass &= later.has_mass;
        self.n_repeated += later.n_repeated;
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
                // A pass, or a token, that started before the border was counted on both sides of it.
                if timestamp_ns != 0 && timestamp_ns == progress.last_pass {
                    self.layers[layer][phase].calls -= 1;
                }
                if progress.starts.append(later.starts) {
                    self.layers[layer][phase].rows -= 1;
                }
                progress.first.get_or_insert((timestamp_ns, phase));
                progress.last_pass = later.last_pass;
            }
        }
    }

    /// Adds counts of one layer and phase, whose ids are in range. Nothing is added, and nothing returned, where all of them
    /// would be more than 64 bits hold: so no sum of some of them is.
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

    /// Adds passes and tokens of one layer and phase, whose ids are in range.
    pub fn add_totals(&mut self, layer: LayerId, phase: Option<Phase>, calls: u64, rows: u64) {
        self.make_room(layer.index());
        let sum = &mut self.layers[layer.index()][phase];
        sum.calls = sum.calls.saturating_add(calls);
        sum.rows = sum.rows.saturating_add(rows);
    }

    fn make_room(&mut self, layer: usize) {
        let n_layer = layer + 1;
        if self.layers.len() < n_layer {
            self.layers.resize(n_layer, Default::default());
            self.progress.resize(n_layer, Progress::default());
        }
    }

    /// The sums of a trace of another tool, of which `facts` are known; nothing if nothing was counted. Where tokens are
    /// unknown, they follow from the choices and the number of experts of a token.
    pub fn finish_foreign(mut self, origin: Origin, facts: &Facts) -> Option<Hotness> {
        for (layer, phases) in (0..).map(LayerId).zip(&mut self.layers) {
            let used = facts.n_expert_used_in(layer).unwrap_or(0);
            for phase in phases.iter_mut() {
                if phase.rows == 0 {
                    phase.rows = LayerCounts::tokens_of(phase.selections(), used);
                }
            }
        }
        let seen = Some(self.n_slot).filter(|&n| n > 0);
        self.origin = origin;
        self.shape = None;
        let mut hotness = self.finish()?;
        if let Some(n_expert) = facts.n_expert {
            hotness.n_expert = Number::Stated(n_expert);
        }
        hotness.n_expert_used = match facts.n_expert_used {
            Some(used) => Number::Stated(used),
            None => Number::Seen(seen.or_else(|| facts.max_expert_used()).unwrap_or(0)),
        };
        Some(hotness)
    }

    /// The sums; nothing if nothing was counted.
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
                phase.assumed_calls = LayerCounts::calls_without_passes(phase.rows, selections);
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
            layers: self.layers,
            origins: vec![self.origin],
        })
    }
}

impl Progress {
    /// Notes the choice of an expert; returns whether its token has chosen it before.
    #[inline]
    fn is_repeated(&mut self, expert: usize) -> bool {
        if self.chosen_by.len() <= expert {
            self.chosen_by.resize(expert + 1, 0);
        }
        std::mem::replace(&mut self.chosen_by[expert], self.token) == self.token
    }
}
