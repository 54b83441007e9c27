//! Experts of the hot cache on a GPU.

use std::collections::HashMap;
use std::rc::Rc;

use moe_gguf::{ExpertId, GgmlType};

use super::Device;
use super::weights::{SLACK, weights};
use crate::cuda::launch::{Kernels, Weights};
use crate::cuda::{DeviceBuffer, Error, Ptr, Result};
use crate::hot_cache::Projections;
use crate::weights::{Linear, Matrix, MatrixKey};

/// The copies of the experts of all lanes on a GPU, by lane and stack.
#[derive(Default)]
pub(super) struct HotExperts {
    pub(super) stacks: HashMap<(usize, MatrixKey), HotStack>,
    /// The lane that contains all experts of a stack.
    complete: HashMap<MatrixKey, usize>,
}

/// Copies of the matrices and biases of some experts of a stack, and of the dummy, which are zero. Layers share the slots of a
/// dynamic cache.
pub(super) struct HotStack {
    pub(super) matrices: Rc<DeviceBuffer>,
    pub(super) bias: Option<Rc<DeviceBuffer>>,
    /// Slot of each expert of the layer.
    pub(super) slots: Vec<Option<u32>>,
    /// Number of slots, with the dummy.
    pub(super) n_slots: usize,
}

impl HotStack {
    /// Size of the copies in bytes.
    pub(super) fn size_bytes(&self) -> u64 {
        let bias = self.bias.as_ref().map_or(0, |bias| bias.size_bytes());
        (self.matrices.size_bytes() + bias) as u64
    }

    /// The same slots for a layer with `n_expert` experts, none of which is in a slot.
    pub(super) fn without_experts(&self, n_expert: usize) -> HotStack {
        HotStack {
            matrices: self.matrices.clone(),
            bias: self.bias.clone(),
            slots: vec![None; n_expert],
            n_slots: self.n_slots,
        }
    }
}

/// A stack of a lane as an operand of a product.
pub(in crate::cuda) struct HotWeights {
    /// One matrix per slot.
    pub weights: Weights,
    /// f32 `(slot, n_out)`, or null.
    pub bias: Ptr,
    /// Number of slots, with the dummy.
    pub n_slots: usize,
}

impl Device {
    /// Copies experts of a layer to a lane. Returns the size of the copies in bytes.
    ///
    /// # Errors
    /// A type has no kernel, or the copies do not fit or cannot be started. Then nothing is kept.
    pub(crate) fn insert_hot(
        &mut self,
        lane: usize,
        projections: Projections,
        experts: &[ExpertId],
    ) -> Result<u64> {
        let stacks = projections.map(|linear| self.copy_hot(linear, experts));
        let [gate, up, down] = stacks;
        let stacks = [gate?, up?, down?];
        let mut bytes = 0;
        for (linear, stack) in projections.into_iter().zip(stacks) {
            let key = linear.weights.key();
            bytes += stack.size_bytes();
            if (0..).zip(&stack.slots).all(|(i, slot)| *slot == Some(i)) {
                self.hot.complete.insert(key, lane);
            }
            self.hot.stacks.insert((lane, key), stack);
        }
        Ok(bytes)
    }

    fn copy_hot(&self, linear: &Linear, experts: &[ExpertId]) -> Result<HotStack> {
        let Linear { weights, bias } = linear;
        check_type(weights.ty)?;
        let n_slots = experts.len() + 1;
        let size = weights.expert_bytes();
        let mut slots = vec![None; weights.n_expert];
        for (slot, expert) in (0..).zip(experts) {
            slots[expert.index()] = Some(slot);
        }
        let stack = HotStack {
            matrices: Rc::new(self.gpu().alloc(n_slots * size + SLACK)?),
            bias: match bias {
                Some(bias) => {
                    let bytes = n_slots * bias.n * size_of::<f32>();
                    Some(Rc::new(self.gpu().alloc(bytes + SLACK)?))
                }
                None => None,
            },
            slots,
            n_slots,
        };
        for (slot, &expert) in experts.iter().enumerate() {
            self.copy_to_slot(&stack, linear, slot, expert)?;
        }
        let dummy = stack.matrices.ptr().offset(experts.len() * size);
        self.gpu().upload(dummy, vec![0u8; size].as_slice())?;
        if let (Some(bias), Some(buffer)) = (bias, &stack.bias) {
            let at = buffer
                .ptr()
                .offset(experts.len() * bias.n * size_of::<f32>());
            self.gpu().upload(at, vec![0f32; bias.n].as_slice())?;
        }
        Ok(stack)
    }

    fn copy_to_slot(
        &self,
        stack: &HotStack,
        linear: &Linear,
        slot: usize,
        expert: ExpertId,
    ) -> Result<()> {
        let matrix = linear.weights.expert(expert.index());
        let at = stack.matrices.ptr().offset(slot * matrix.len());
        self.gpu().upload(at, matrix)?;
        if let (Some(bias), Some(buffer)) = (&linear.bias, &stack.bias) {
            let bias = bias.expert(expert.index());
            let at = buffer.ptr().offset(slot * size_of_val(bias));
            self.gpu().upload(at, bias)?;
        }
        Ok(())
    }

    /// Copies an expert over the one in a slot of a lane.
    ///
    /// # Errors
    /// A copy cannot be started. Then the slot is not used.
    pub(crate) fn replace_hot(
        &mut self,
        lane: usize,
        projections: Projections,
        slot: usize,
        expert: ExpertId,
    ) -> Result<()> {
        for linear in projections {
            let key = (lane, linear.weights.key());
            if let Some(stack) = self.hot.stacks.get_mut(&key) {
                let before = stack.slots.iter_mut();
                let before = before.filter(|at| **at == Some(slot as u32));
                before.for_each(|at| *at = None);
            }
        }
        for linear in projections {
            let key = (lane, linear.weights.key());
            if let Some(stack) = self.hot.stacks.get(&key) {
                self.copy_to_slot(stack, linear, slot, expert)?;
            }
        }
        for linear in projections {
            let key = (lane, linear.weights.key());
            if let Some(stack) = self.hot.stacks.get_mut(&key) {
                stack.slots[expert.index()] = Some(slot as u32);
            }
        }
        Ok(())
    }

    /// Frees the experts of all lanes, and the slots of a dynamic cache.
    pub(crate) fn clear_hot(&mut self) {
        self.clear_slots();
        self.hot = HotExperts::default();
    }

    /// Whether a lane on this GPU contains all experts of a stack, each in the slot with its number.
    pub(crate) fn has_all_hot(&self, matrix: &Matrix) -> bool {
        self.hot.complete.contains_key(&matrix.key())
    }

    /// Whether a lane on this GPU contains an expert of a stack.
    pub(crate) fn is_hot(&self, matrix: &Matrix, expert: i32) -> bool {
        self.hot_matrix(matrix, expert as usize).is_some()
    }

    /// The stack of a lane that contains all experts.
    pub(super) fn complete_hot(&self, matrix: &Matrix) -> Option<Weights> {
        let key = matrix.key();
        let lane = *self.hot.complete.get(&key)?;
        let stack = self.hot.stacks.get(&(lane, key))?;
        let ptr = stack.matrices.ptr();
        Some(weights(matrix, ptr, matrix.ty, matrix.row_size))
    }

    /// Address of the matrix of an expert in a lane.
    pub(super) fn hot_matrix(&self, matrix: &Matrix, expert: usize) -> Option<Ptr> {
        let key = matrix.key();
        (0..moe_placement::plan::MAX_LANES).find_map(|lane| {
            let stack = self.hot.stacks.get(&(lane, key))?;
            let slot = (*stack.slots.get(expert)?)?;
            let at = slot as usize * matrix.expert_bytes();
            Some(stack.matrices.ptr().offset(at))
        })
    }

    /// The stack of a lane.
    ///
    /// # Errors
    /// The lane does not contain it.
    pub(in crate::cuda) fn hot_weights(&self, lane: usize, linear: &Linear) -> Result<HotWeights> {
        let matrix = &linear.weights;
        let stack = self.hot.stacks.get(&(lane, matrix.key()));
        let stack = stack.ok_or_else(|| Error::Unsupported {
            kernel: "hot_lane",
            what: format!("tensor {}, which is not in lane {lane}", matrix.place.name),
        })?;
        Ok(HotWeights {
            weights: weights(matrix, stack.matrices.ptr(), matrix.ty, matrix.row_size),
            bias: stack.bias.as_ref().map_or(Ptr::NULL, |bias| bias.ptr()),
            n_slots: stack.n_slots,
        })
    }
}

/// # Errors
/// The type has no kernel.
pub(super) fn check_type(ty: GgmlType) -> Result<()> {
    if Kernels::supports(ty) {
        return Ok(());
    }
    Err(Error::Unsupported {
        kernel: "mul_mat",
        what: format!("type {}", ty.name()),
    })
}
