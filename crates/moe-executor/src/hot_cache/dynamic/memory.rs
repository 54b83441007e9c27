//! The slots of a dynamic cache, in GPU memory or in CPU memory.

use moe_gguf::{ExpertId, GgmlType, LayerId};
use moe_placement::dynamic::Slot;

use super::super::contents::{Compact, Projections};
use super::super::{HotCache, UNGATED};
use crate::cuda::Device;
use crate::device_id::DeviceId;
use crate::devices::Devices;
use crate::model::Model;
use crate::weights::Linear;

/// The slots of all classes, and the weights that are copied to them.
pub(super) struct SlotMemory<'a> {
    device: DeviceId,
    /// By layer number; `None` for layers that are not cached.
    layers: Vec<Option<LayerSlots<'a>>>,
    classes: Vec<Class>,
}

/// Weights of a layer, and the class of its slots.
struct LayerSlots<'a> {
    projections: Projections<'a, 'a>,
    class: usize,
}

/// Slots for experts of the same types and shapes.
#[derive(Default)]
struct Class {
    n_slots: usize,
    /// The slots in CPU memory. They are lent to the layer that runs.
    on_cpu: Option<[Compact; 3]>,
}

/// When a copy to a slot on a GPU runs, relative to the work of the compute stream.
#[derive(Clone, Copy)]
pub(super) enum CopyOrder {
    /// After all work so far, before all later work.
    InStream,
    /// Without order: no running work uses the slot. [`Device::answer`] waits for the copy.
    Ahead,
    /// After all work so far. [`SlotMemory::wait_for`] orders later work after the copy.
    Prefetch,
}

/// Type, shape, and whether there is a bias: what the experts of a class have in common, for each projection.
type Shape = [(GgmlType, usize, usize, bool); 3];

fn shape(projections: Projections) -> Shape {
    projections
        .map(|Linear { weights, bias }| (weights.ty, weights.n_in, weights.n_out, bias.is_some()))
}

impl<'a> SlotMemory<'a> {
    /// No slots yet, for the layers of `model` whose experts are in CPU memory and, if `device` is a GPU, have kernels. Also
    /// returns the other layers with experts, and why they are not cached.
    pub fn new(
        model: &'a Model<'_>,
        devices: &Devices,
        device: DeviceId,
    ) -> (SlotMemory<'a>, Vec<(LayerId, String)>) {
        let (mut layers, mut shapes, mut dropped) = (Vec::new(), Vec::new(), Vec::new());
        for layer in (0..).map(LayerId).take(model.hparams().n_layer) {
            let moe = model.decoder.moe(layer);
            layers.push(moe.and_then(|moe| {
                let projections: Option<Projections<'a, 'a>> = moe.projections();
                let Some(projections) = projections else {
                    dropped.push((layer, UNGATED.to_owned()));
                    return None;
                };
                if let Some(reason) = unsupported(projections, devices, device) {
                    dropped.push((layer, reason));
                    return None;
                }
                let shape = shape(projections);
                let class = shapes.iter().position(|other| *other == shape);
                let class = class.unwrap_or_else(|| {
                    shapes.push(shape);
                    shapes.len() - 1
                });
                Some(LayerSlots { projections, class })
            }));
        }
        let memory = SlotMemory {
            device,
            layers,
            classes: shapes.iter().map(|_| Class::default()).collect(),
        };
        (memory, dropped)
    }

    /// Device of the slots.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Class of the slots of a layer; `None` if it is not cached.
    pub fn class(&self, layer: LayerId) -> Option<usize> {
        Some(self.layer(layer)?.class)
    }

    /// Number of slots that a layer shares with the layers of its class.
    pub fn n_slots(&self, layer: LayerId) -> usize {
        self.class(layer)
            .map_or(0, |class| self.classes[class].n_slots)
    }

    /// Layers of a class.
    pub fn layers_of(&self, class: usize) -> Vec<LayerId> {
        let layers = (0..).map(LayerId).zip(&self.layers);
        let layers = layers.filter(|(_, layer)| layer.as_ref().is_some_and(|l| l.class == class));
        layers.map(|(layer, _)| layer).collect()
    }

    fn layer(&self, layer: LayerId) -> Option<&LayerSlots<'a>> {
        self.layers.get(layer.index())?.as_ref()
    }

    /// Allocates the slots of a class, and a dummy. Returns their size in bytes, or why they cannot be allocated.
    pub fn allocate(
        &mut self,
        devices: &mut Devices,
        class: usize,
        n_slots: usize,
    ) -> Result<u64, String> {
        let layers = self
            .layers
            .iter()
            .flatten()
            .filter(|layer| layer.class == class);
        let layers: Vec<Projections> = layers.map(|layer| layer.projections).collect();
        let Some(&first) = layers.first().filter(|_| n_slots > 0) else {
            return Ok(0);
        };
        let memory = &mut self.classes[class];
        memory.n_slots = n_slots;
        match devices.gpu_mut(self.device) {
            Some(gpu) => {
                let inserted = gpu.insert_slots(class, &layers, n_slots);
                inserted.map_err(|error| error.to_string())
            }
            None => {
                let copies = first.map(|linear| Compact::with_slots(linear, n_slots));
                let bytes = copies.iter().map(Compact::bytes).sum();
                memory.on_cpu = Some(copies);
                Ok(bytes)
            }
        }
    }

    /// Starts the copy of an expert to a slot of its layer.
    pub fn copy(
        &mut self,
        devices: &mut Devices,
        layer: LayerId,
        expert: ExpertId,
        slot: Slot,
        order: CopyOrder,
    ) -> Result<(), String> {
        let Some(LayerSlots { projections, class }) = self.layer(layer) else {
            return Ok(());
        };
        let (projections, class) = (*projections, *class);
        if let Some(gpu) = devices.gpu_mut(self.device) {
            let slot = (class, slot);
            let copied = match order {
                CopyOrder::InStream => gpu.load_slot(slot, projections, expert),
                CopyOrder::Ahead => gpu.load_slot_ahead(slot, projections, expert),
                CopyOrder::Prefetch => gpu.prefetch_slot(slot, projections, expert),
            };
            return copied.map_err(|error| error.to_string());
        }
        for (copies, linear) in self.classes[class]
            .on_cpu
            .iter_mut()
            .flatten()
            .zip(projections)
        {
            copies.replace(linear, slot as usize, expert);
        }
        Ok(())
    }

    /// Notes that an expert is no longer in its slot.
    pub fn free(&mut self, devices: &mut Devices, layer: LayerId, expert: ExpertId) {
        let projections = self.layer(layer).map(|layer| layer.projections);
        if let (Some(gpu), Some(projections)) = (devices.gpu_mut(self.device), projections) {
            gpu.free_slot(projections, expert);
        }
    }

    /// Whether the copy to a slot of a layer has ended.
    pub fn is_complete(&self, devices: &Devices, layer: LayerId, slot: Slot) -> bool {
        let gpu = devices.gpu(self.device).zip(self.class(layer));
        gpu.is_none_or(|(gpu, class)| gpu.slot_is_complete((class, slot)))
    }

    /// Orders later work on the device of the slots after the copy to a slot of a layer.
    pub fn wait_for(
        &self,
        devices: &mut Devices,
        layer: LayerId,
        slot: Slot,
    ) -> Result<(), String> {
        match devices.gpu_mut(self.device).zip(self.class(layer)) {
            Some((gpu, class)) => {
                let waits = gpu.wait_for_slot((class, slot));
                waits.map_err(|error| error.to_string())
            }
            None => Ok(()),
        }
    }

    /// Lends slots in CPU memory to a layer.
    pub fn lend(&mut self, hot: &mut HotCache, layer: LayerId) {
        self.exchange(hot, layer);
    }

    /// Takes the slots back from a layer.
    pub fn take_back(&mut self, hot: &mut HotCache, layer: LayerId) {
        self.exchange(hot, layer);
    }

    fn exchange(&mut self, hot: &mut HotCache, layer: LayerId) {
        let Some(class) = self.class(layer) else {
            return;
        };
        let contents = hot.layers.get_mut(layer.index()).and_then(Option::as_mut);
        if let Some(lane) = contents.and_then(|contents| contents.lanes[0].as_mut()) {
            std::mem::swap(&mut lane.on_cpu, &mut self.classes[class].on_cpu);
        }
    }
}

/// Why the experts of a layer cannot be in slots on `device`.
fn unsupported(projections: Projections, devices: &Devices, device: DeviceId) -> Option<String> {
    let weights = projections.map(|linear| &linear.weights);
    let placed = weights.map(|matrix| devices.placed(matrix));
    if let Some(gpu) = placed.into_iter().find(|&placed| placed != DeviceId::Cpu) {
        return Some(format!("expert matrices of the layer are on {gpu} already"));
    }
    let unknown = weights
        .into_iter()
        .find(|matrix| !Device::supports(matrix.ty));
    let unknown = unknown.filter(|_| device != DeviceId::Cpu)?;
    Some(format!("type {} has no GPU kernels", unknown.ty.name()))
}
