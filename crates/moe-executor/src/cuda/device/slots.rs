//! Slots of the dynamic cache on a GPU, and the copies to them.

use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};
use moe_gguf::ExpertId;

use super::Device;
use super::hot::{HotStack, check_type};
use super::weights::SLACK;
use crate::cuda::gpu::upload_on;
use crate::cuda::{Error, Gpu, Ptr, Result};
use crate::hot_cache::Projections;
use crate::weights::Linear;

/// The lane of the slots.
const LANE: usize = 0;

/// A slot: its class, and its number in the class.
type SlotId = (usize, u32);

/// The stream of prefetches, and the state of the copies to each slot.
pub(super) struct SlotCopies {
    stream: Arc<CudaStream>,
    /// Recorded on the compute stream where a prefetch waits for it.
    so_far: CudaEvent,
    /// By class and slot: the last prefetch.
    prefetches: Vec<Vec<Prefetch>>,
}

/// The last prefetch to a slot.
#[derive(Default)]
struct Prefetch {
    /// The event after it.
    end: Option<CudaEvent>,
    /// Whether the compute stream has not waited for it yet.
    is_in_flight: bool,
}

impl SlotCopies {
    fn new(gpu: &Gpu) -> Result<SlotCopies> {
        Ok(SlotCopies {
            stream: gpu.new_stream()?,
            so_far: gpu.event()?,
            prefetches: Vec::new(),
        })
    }

    /// The stream of prefetches.
    pub(super) fn stream(&self) -> &CudaStream {
        &self.stream
    }

    fn add_class(&mut self, class: usize, n_slots: usize) {
        if self.prefetches.len() <= class {
            self.prefetches.resize_with(class + 1, Vec::new);
        }
        self.prefetches[class].resize_with(n_slots, Prefetch::default);
    }

    fn get_mut(&mut self, (class, slot): SlotId) -> Option<&mut Prefetch> {
        self.prefetches.get_mut(class)?.get_mut(slot as usize)
    }

    fn get(&self, (class, slot): SlotId) -> Option<&Prefetch> {
        self.prefetches.get(class)?.get(slot as usize)
    }
}

impl Drop for SlotCopies {
    fn drop(&mut self) {
        // The compute stream frees the slots, and prefetches may still write to them.
        let _ = self.stream.synchronize();
    }
}

impl Device {
    /// Allocates `n_slots` slots, and a dummy, that the layers `layers` share. Returns their size in bytes.
    ///
    /// # Errors
    /// A type has no kernel, or the slots do not fit. Then nothing is kept.
    pub(crate) fn insert_slots(
        &mut self,
        class: usize,
        layers: &[Projections],
        n_slots: usize,
    ) -> Result<u64> {
        let Some(&first) = layers.first() else {
            return Ok(0);
        };
        let [gate, up, down] = first.map(|linear| self.empty_stack(linear, n_slots));
        let stacks = [gate?, up?, down?];
        let copies = match self.slots.take() {
            Some(copies) => copies,
            None => SlotCopies::new(&self.gpu)?,
        };
        self.slots.insert(copies).add_class(class, n_slots);
        let bytes = stacks.iter().map(HotStack::size_bytes).sum();
        for projections in layers {
            for (linear, stack) in projections.iter().zip(&stacks) {
                let shared = stack.without_experts(linear.weights.n_expert);
                let key = (LANE, linear.weights.key());
                self.hot.stacks.insert(key, shared);
            }
        }
        Ok(bytes)
    }

    /// Memory for `n_slots` experts of a stack, and a dummy of zeros.
    fn empty_stack(&self, linear: &Linear, n_slots: usize) -> Result<HotStack> {
        let Linear { weights, bias } = linear;
        check_type(weights.ty)?;
        let size = weights.expert_bytes();
        let matrices = self.gpu.alloc((n_slots + 1) * size + SLACK)?;
        let dummy = matrices.ptr().offset(n_slots * size);
        self.gpu.upload(dummy, vec![0u8; size].as_slice())?;
        let bias = match bias {
            Some(bias) => {
                let size = bias.n * size_of::<f32>();
                let biases = self.gpu.alloc((n_slots + 1) * size + SLACK)?;
                let dummy = biases.ptr().offset(n_slots * size);
                self.gpu.upload(dummy, vec![0u8; size].as_slice())?;
                Some(Rc::new(biases))
            }
            None => None,
        };
        Ok(HotStack {
            matrices: Rc::new(matrices),
            bias,
            slots: Vec::new(),
            n_slots: n_slots + 1,
        })
    }

    /// Copies an expert to a slot, after all work launched so far, and before all work launched later.
    ///
    /// # Errors
    /// A copy cannot be started. Then the slot must not be used.
    pub(crate) fn load_slot(
        &mut self,
        slot: SlotId,
        projections: Projections,
        expert: ExpertId,
    ) -> Result<()> {
        // A prefetch whose expert was not used may still write to the slot.
        self.wait_for_slot(slot)?;
        for linear in projections {
            self.copy_expert(linear, slot, expert, |gpu, to, bytes| gpu.upload(to, bytes))?;
        }
        self.set_slot(projections, expert, Some(slot.1));
        Ok(())
    }

    /// Starts the copy of an expert to a slot that no running work uses, for [`Device::answer`].
    ///
    /// # Errors
    /// A copy cannot be started. Then the slot must not be used.
    pub(crate) fn load_slot_ahead(
        &mut self,
        slot: SlotId,
        projections: Projections,
        expert: ExpertId,
    ) -> Result<()> {
        let Some(copies) = &self.slots else {
            return Ok(());
        };
        let stream = copies.stream.clone();
        for linear in projections {
            self.copy_expert(linear, slot, expert, |_, to, bytes| {
                upload_on(&stream, to, bytes)
            })?;
        }
        self.set_slot(projections, expert, Some(slot.1));
        Ok(())
    }

    /// Starts the copy of an expert to a slot, after all work launched so far. [`Device::wait_for_slot`] orders later work after
    /// the copy.
    ///
    /// # Errors
    /// A copy cannot be started. Then the slot must not be used.
    pub(crate) fn prefetch_slot(
        &mut self,
        slot: SlotId,
        projections: Projections,
        expert: ExpertId,
    ) -> Result<()> {
        let failed = |source| Error::driver("a prefetch", source);
        let Some(copies) = &self.slots else {
            return Ok(());
        };
        let stream = copies.stream.clone();
        copies.so_far.record(self.gpu.stream()).map_err(failed)?;
        stream.wait(&copies.so_far).map_err(failed)?;
        // Noted first: the compute stream must wait for copies of an expert of which some have started.
        let end = self.gpu.event()?;
        for linear in projections {
            let copied = self.copy_expert(linear, slot, expert, |_, to, bytes| {
                upload_on(&stream, to, bytes)
            });
            if let Err(error) = copied {
                self.prefetched(slot, end, &stream)?;
                return Err(error);
            }
        }
        self.prefetched(slot, end, &stream)?;
        self.set_slot(projections, expert, Some(slot.1));
        Ok(())
    }

    /// Records the end of a prefetch.
    fn prefetched(&mut self, slot: SlotId, end: CudaEvent, stream: &CudaStream) -> Result<()> {
        let recorded = end.record(stream);
        if let Some(prefetch) = self.slots.as_mut().and_then(|copies| copies.get_mut(slot)) {
            prefetch.end = Some(end);
            prefetch.is_in_flight = true;
        }
        recorded.map_err(|source| Error::driver("recording an event", source))
    }

    /// Copies the matrix and the bias of an expert of one stack with `copy`.
    fn copy_expert(
        &self,
        linear: &Linear,
        (_, slot): SlotId,
        expert: ExpertId,
        copy: impl Fn(&Gpu, Ptr, &[u8]) -> Result<()>,
    ) -> Result<()> {
        use zerocopy::IntoBytes as _;
        let stack = self.hot.stacks.get(&(LANE, linear.weights.key()));
        let Some(stack) = stack else {
            return Ok(());
        };
        let matrix = linear.weights.expert(expert.index());
        let at = stack.matrices.ptr().offset(slot as usize * matrix.len());
        copy(&self.gpu, at, matrix)?;
        if let (Some(bias), Some(buffer)) = (&linear.bias, &stack.bias) {
            let bias = bias.expert(expert.index());
            let at = buffer.ptr().offset(slot as usize * size_of_val(bias));
            copy(&self.gpu, at, bias.as_bytes())?;
        }
        Ok(())
    }

    /// Orders later work after the copy to a slot.
    ///
    /// # Errors
    /// The driver reports an error. Then the slot must not be used.
    pub(crate) fn wait_for_slot(&mut self, slot: SlotId) -> Result<()> {
        let prefetch = self.slots.as_mut().and_then(|copies| copies.get_mut(slot));
        if let Some(prefetch) = prefetch.filter(|prefetch| prefetch.is_in_flight)
            && let Some(end) = &prefetch.end
        {
            self.gpu.follow_copy();
            let waits = self.gpu.stream().wait(end);
            waits.map_err(|source| Error::driver("a wait between streams", source))?;
            prefetch.is_in_flight = false;
        }
        Ok(())
    }

    /// Whether the last prefetch to a slot has ended.
    pub(crate) fn slot_is_complete(&self, slot: SlotId) -> bool {
        let prefetch = self.slots.as_ref().and_then(|copies| copies.get(slot));
        prefetch.is_none_or(|prefetch| {
            let end = prefetch.end.as_ref().filter(|_| prefetch.is_in_flight);
            end.is_none_or(CudaEvent::is_complete)
        })
    }

    /// Notes that an expert is no longer in its slot.
    pub(crate) fn free_slot(&mut self, projections: Projections, expert: ExpertId) {
        self.set_slot(projections, expert, None);
    }

    fn set_slot(&mut self, projections: Projections, expert: ExpertId, slot: Option<u32>) {
        for linear in projections {
            let key = (LANE, linear.weights.key());
            if let Some(stack) = self.hot.stacks.get_mut(&key) {
                stack.slots[expert.index()] = slot;
            }
        }
        let [gate, ..] = projections;
        let layer = gate.weights.place.layer;
        if let (Some(finder), Some(layer)) = (&mut self.finder, layer) {
            finder.set(layer, expert, slot);
        }
    }

    /// Frees the slots.
    pub(super) fn clear_slots(&mut self) {
        self.slots = None;
        self.finder = None;
    }
}
