//! The experts of a layer in the lanes of a hot cache.

use moe_gguf::ExpertId;
use moe_placement::perf::LaneIndex;
use moe_placement::plan::MAX_LANES;

use super::worklist::Place;
use crate::weights::{Linear, Stack};

/// Gate, up and down of a layer, in this order.
pub(crate) type Projections<'a, 'g> = [&'a Linear<'g>; 3];

/// A layer of the cache.
pub(crate) struct LayerCache {
    /// Place of each expert of the layer.
    pub places: Vec<Place>,
    /// The part of each hot lane; `None` if the lane has no experts of the layer.
    pub lanes: [Option<LaneLayer>; MAX_LANES],
    /// The lane on a GPU that contains all experts, each in the slot with its number. The layer then runs like a layer whose
    /// experts are resident: ids need no mapping.
    pub complete: Option<LaneIndex>,
}

/// The experts of a layer in one lane.
pub(crate) struct LaneLayer {
    /// Expert of each slot; `None` for a slot whose copy failed. One more slot, the dummy, follows.
    pub experts: Vec<Option<ExpertId>>,
    /// The matrices of the slots in CPU memory, for gate, up and down; `None` if they are on a GPU.
    pub on_cpu: Option<[Compact; 3]>,
    /// Bytes of the copies.
    pub bytes: u64,
}

/// Copies of the matrices and biases of some experts in CPU memory, and those of the dummy, which are zero.
pub(crate) struct Compact {
    matrices: Vec<u8>,
    /// `(slot, n_out)`; empty without a bias.
    bias: Vec<f32>,
}

impl Compact {
    /// `n_slots` slots of zeros, and the dummy.
    pub fn with_slots(linear: &Linear, n_slots: usize) -> Compact {
        let bias = linear.bias.as_ref().map_or(0, |bias| bias.n);
        Compact {
            matrices: vec![0; (n_slots + 1) * linear.weights.expert_bytes()],
            bias: vec![0.0; (n_slots + 1) * bias],
        }
    }

    /// Copies of `experts`.
    pub fn new(linear: &Linear, experts: &[ExpertId]) -> Compact {
        let mut compact = Compact::with_slots(linear, experts.len());
        for (slot, &expert) in experts.iter().enumerate() {
            compact.replace(linear, slot, expert);
        }
        compact
    }

    /// Copies the matrix and the bias of an expert into a slot.
    pub fn replace(&mut self, linear: &Linear, slot: usize, expert: ExpertId) {
        let matrix = linear.weights.expert(expert.index());
        let size = matrix.len();
        self.matrices[slot * size..][..size].copy_from_slice(matrix);
        if let Some(bias) = &linear.bias {
            let bias = bias.expert(expert.index());
            self.bias[slot * bias.len()..][..bias.len()].copy_from_slice(bias);
        }
    }

    /// Its matrices; `linear` is the one it was copied from.
    pub fn stack(&self, linear: &Linear) -> Stack<'_> {
        linear.weights.stack_of(&self.matrices)
    }

    /// The biases `(slot, n_out)`; empty without a bias.
    pub fn bias(&self) -> &[f32] {
        &self.bias
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        (self.matrices.len() + size_of_val(self.bias.as_slice())) as u64
    }
}

impl LayerCache {
    /// A layer with `n_expert` experts, none of them cached.
    pub fn new(n_expert: usize) -> LayerCache {
        LayerCache {
            places: (0..n_expert).map(Place::cold).collect(),
            lanes: [const { None }; MAX_LANES],
            complete: None,
        }
    }

    /// Puts a lane's part of the layer into the cache.
    pub fn insert(&mut self, lane: LaneIndex, part: LaneLayer) {
        for (index, expert) in (0..).zip(&part.experts) {
            if let Some(expert) = expert {
                self.places[expert.index()] = Place { lane, index };
            }
        }
        let is_identity = part.experts.len() == self.places.len()
            && (0..)
                .zip(&part.experts)
                .all(|(i, e)| *e == Some(ExpertId(i)));
        if is_identity && part.on_cpu.is_none() {
            self.complete = Some(lane);
        }
        if let Some(index) = lane.hot_index() {
            self.lanes[index] = Some(part);
        }
    }

    /// Number of matrices that the entries of a lane can select: slots, or the experts of the file.
    pub fn n_matrices(&self, lane: LaneIndex) -> usize {
        let part = lane.hot_index().and_then(|lane| self.lanes[lane].as_ref());
        part.map_or(0, |part| part.experts.len())
            .max(self.places.len())
    }

    /// Whether any expert is cached.
    pub fn is_cached(&self) -> bool {
        self.places
            .iter()
            .any(|place| place.lane != LaneIndex::Cold)
    }
}
