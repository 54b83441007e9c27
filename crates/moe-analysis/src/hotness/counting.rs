//! The counter that both readers, of traces and of tables, feed.

use moe_trace::manifest::Model;

use super::origin::Origin;
use super::{Error, Hotness, LayerPhase, MAX_ID};

/// What the model says of its experts; without a model, what is seen decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    n_expert: u32,
    n_expert_used: u32,
}

impl Shape {
    /// The shape of a recorded model, if its recorder told it.
    fn of(model: &Model) -> Option<Shape> {
        let Model {
            n_expert,
            n_expert_used,
            ..
        } = *model;
        (n_expert > 0 && n_expert_used > 0).then_some(Shape {
            n_expert,
            n_expert_used,
        })
    }
}

/// One expert of one token in one layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub layer: u32,
    /// 0 prompt, 1 generate
    pub phase: usize,
    /// Tells passes of a layer apart.
    pub timestamp_ns: u64,
    /// Rank in the token's top-k.
    pub slot: u32,
    pub expert: u32,
    pub weight: f64,
}

/// Sums choices; they must come in the order of the passes, and a token's in the order of the slots.
pub(super) struct Counter {
    shape: Option<Shape>,
    origin: Origin,
    highest_slot: u32,
    /// `[n_layer][phase]`
    layers: Vec<[LayerPhase; 2]>,
    /// `[n_layer]`: timestamp of the last pass seen.
    last_pass: Vec<u64>,
}

impl Counter {
    pub fn new(origin: Origin) -> Counter {
        Counter {
            shape: origin.model().and_then(Shape::of),
            origin,
            highest_slot: 0,
            layers: Vec::new(),
            last_pass: Vec::new(),
        }
    }

    /// Counts one choice; `place` tells where it was read, should it be impossible.
    pub fn add(&mut self, choice: Choice, place: impl Fn() -> String) -> Result<(), Error> {
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
        check("layer", choice.layer, MAX_ID)?;
        check(
            "expert",
            choice.expert,
            self.shape.map_or(MAX_ID, |shape| shape.n_expert),
        )?;
        check("phase", choice.phase as u32, 2)?;

        let layer = choice.layer as usize;
        if self.layers.len() <= layer {
            self.layers.resize(layer + 1, Default::default());
            self.last_pass.resize(layer + 1, 0);
        }
        let phase = &mut self.layers[layer][choice.phase];
        if self.last_pass[layer] != choice.timestamp_ns {
            self.last_pass[layer] = choice.timestamp_ns;
            phase.calls += 1;
        }
        if choice.slot == 0 {
            phase.rows += 1;
        }
        self.highest_slot = self.highest_slot.max(choice.slot);
        let tally = phase.expert(choice.expert as usize);
        tally.count += 1;
        tally.mass += choice.weight;
        Ok(())
    }

    /// The sums; nothing if nothing was counted.
    pub fn finish(self) -> Option<Hotness> {
        let experts = self
            .layers
            .iter()
            .flatten()
            .map(|phase| phase.experts.len() as u32);
        let seen = experts.max().filter(|&experts| experts > 0)?;
        let shape = self.shape.unwrap_or(Shape {
            n_expert: seen,
            n_expert_used: self.highest_slot + 1,
        });
        Some(Hotness {
            n_expert: shape.n_expert,
            n_expert_used: shape.n_expert_used,
            layers: self.layers,
            origins: vec![self.origin],
        })
    }
}
