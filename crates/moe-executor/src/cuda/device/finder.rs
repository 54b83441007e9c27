//! Slots of selected experts that a GPU finds itself, so that the CPU does not wait for the routing decisions.
//!
//! A kernel looks the experts up in a table. If all are in slots, the stream continues. Otherwise it waits at a word in pinned memory
//! until the CPU has copied the missing experts. The CPU reads the selected experts from pinned memory when it needs them.

use std::sync::atomic::Ordering;

use cudarc::driver::{CudaStream, sys};
use moe_gguf::{ExpertId, LayerId};

use super::Device;
use crate::cuda::gpu::upload_on;
use crate::cuda::launch::FindSlots;
use crate::cuda::{DeviceBuffer, Error, Gpu, Pinned, Ptr, Result};
use crate::recorder::Routing;

/// Words of a layer in pinned memory before the selected experts: the word that the stream waits for, the number of the last search,
/// and the number of experts without a slot.
const HEAD: usize = 3;
/// Bytes of a cache line, so that layers do not share one.
const LINE: usize = 128;

/// The table of slots, and the results of the searches, by layer number.
pub(super) struct Finder {
    n_expert: usize,
    k: usize,
    /// `(layer, n_expert)`: slot of each expert, or -1.
    slots: Vec<i32>,
    /// Layers whose part of the table on the GPU is old.
    changed: Vec<bool>,
    table: DeviceBuffer,
    /// i32 `(layer, k)`: slots of the selected experts.
    found: DeviceBuffer,
    /// Mail of each layer.
    mail: Pinned,
    mail_bytes: usize,
}

impl Finder {
    fn new(gpu: &Gpu, n_layer: usize, n_expert: usize, k: usize) -> Result<Finder> {
        let mail_bytes = ((HEAD + k) * size_of::<u32>()).next_multiple_of(LINE);
        Ok(Finder {
            n_expert,
            k,
            slots: vec![-1; n_layer * n_expert],
            changed: vec![true; n_layer],
            table: gpu.alloc(n_layer * n_expert * size_of::<i32>())?,
            found: gpu.alloc(n_layer * k * size_of::<i32>())?,
            mail: gpu.pinned(n_layer * mail_bytes)?,
            mail_bytes,
        })
    }

    /// Notes the slot of an expert.
    pub(super) fn set(&mut self, layer: LayerId, expert: ExpertId, slot: Option<u32>) {
        let at = layer.index() * self.n_expert + expert.index();
        let slot = slot.and_then(|slot| i32::try_from(slot).ok());
        if let Some(entry) = self.slots.get_mut(at) {
            *entry = slot.unwrap_or(-1);
            self.changed[layer.index()] = true;
        }
    }

    /// Copies changed parts of the table to the GPU on `stream`.
    fn update(&mut self, stream: &CudaStream) -> Result<()> {
        use zerocopy::IntoBytes as _;
        let rows = self.slots.chunks_exact(self.n_expert).enumerate();
        for (layer, row) in rows.filter(|(layer, _)| self.changed[*layer]) {
            let bytes = row.as_bytes();
            upload_on(stream, self.table.ptr().offset(layer * bytes.len()), bytes)?;
        }
        self.changed.fill(false);
        Ok(())
    }

    /// Address of a word of a layer's mail.
    fn word(&self, layer: LayerId, word: usize) -> Ptr {
        let at = layer.index() * self.mail_bytes + word * size_of::<u32>();
        self.mail.ptr().offset(at)
    }

    fn read(&self, layer: LayerId, word: usize) -> u32 {
        let at = layer.index() * self.mail_bytes / size_of::<u32>() + word;
        self.mail.words()[at].load(Ordering::Acquire)
    }

    fn found(&self, layer: LayerId) -> Ptr {
        let at = layer.index() * self.k * size_of::<i32>();
        self.found.ptr().offset(at)
    }
}

/// What a search has found.
pub(crate) struct Found {
    /// Number of experts without a slot.
    pub missing: u32,
    /// The selected experts.
    pub ids: Vec<i32>,
}

fn without_table() -> Error {
    Error::Unsupported {
        kernel: "find_slots",
        what: "a cache without a table of slots".to_owned(),
    }
}

impl Device {
    /// Prepares searches for the slots of the experts of `n_layer` layers.
    ///
    /// # Errors
    /// Memory cannot be allocated, or a kernel cannot be launched.
    pub(crate) fn enable_finder(
        &mut self,
        n_layer: usize,
        n_expert: usize,
        k: usize,
    ) -> Result<()> {
        let finder = Finder::new(&self.gpu, n_layer, n_expert, k)?;
        // Loads the kernel: loading it later may wait for the stream.
        let search = FindSlots {
            ids: finder.found.ptr(),
            table: finder.table.ptr(),
            k: 0,
            dummy: 0,
            number: 0,
            slots: finder.found.ptr(),
            mail: finder.word(LayerId(0), 2),
            mailed: finder.word(LayerId(0), 1),
            go: finder.word(LayerId(0), 0),
        };
        self.kernels().find_slots(self.stream(), &search)?;
        self.gpu.synchronize()?;
        self.finder = Some(finder);
        Ok(())
    }

    /// Starts search `number` for the slots of the experts that `layer` has selected for one token; `dummy` is the slot of experts that
    /// have none. Later work on the compute stream waits until all have slots. Returns the address of the slots, i32 `(k)`.
    ///
    /// # Errors
    /// The search cannot be started. Then [`Device::release`] is needed: the stream may wait for it.
    pub(crate) fn find_slots(
        &mut self,
        layer: LayerId,
        number: u32,
        dummy: usize,
        routing: &mut Routing,
    ) -> Result<Ptr> {
        let ids = routing.ids.device(&self.gpu)?;
        let Some(finder) = &mut self.finder else {
            return Err(without_table());
        };
        self.gpu.follow_copy();
        finder.update(self.gpu.stream())?;
        let row = layer.index() * finder.n_expert * size_of::<i32>();
        let search = FindSlots {
            ids,
            table: finder.table.ptr().offset(row),
            k: routing.n_expert_used.min(finder.k),
            dummy,
            number,
            slots: finder.found(layer),
            mail: finder.word(layer, 2),
            mailed: finder.word(layer, 1),
            go: finder.word(layer, 0),
        };
        let stream = self.gpu.stream();
        self.gpu.kernels().find_slots(stream, &search)?;
        let flag = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        self.gpu.follow_copy();
        // SAFETY: the word is in pinned memory that lives until the stream is idle. The stream is of the current context.
        let waits =
            unsafe { sys::cuStreamWaitValue32_v2(stream.cu_stream(), search.go.0, number, flag) };
        waits
            .result()
            .map_err(|source| Error::driver("a wait for slots", source))?;
        Ok(search.slots)
    }

    /// The result of search `number` of a layer; `None` if it has not ended.
    ///
    /// # Errors
    /// The compute stream failed, the search was not started, or searches are not enabled.
    pub(crate) fn found(&self, layer: LayerId, number: u32, k: usize) -> Result<Option<Found>> {
        let finder = self.finder.as_ref().ok_or_else(without_table)?;
        if finder.read(layer, 1) == number {
            let id = |slot| finder.read(layer, HEAD + slot).cast_signed();
            return Ok(Some(Found {
                missing: finder.read(layer, 2),
                ids: (0..k).map(id).collect(),
            }));
        }
        // SAFETY: the stream is of a context that lives as long as the GPU.
        let state = unsafe { sys::cuStreamQuery(self.gpu.stream().cu_stream()) };
        match state {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(None),
            sys::CUresult::CUDA_SUCCESS if finder.read(layer, 1) == number => {
                self.found(layer, number, k)
            }
            sys::CUresult::CUDA_SUCCESS => Err(Error::Unsupported {
                kernel: "find_slots",
                what: "a search that was not started".to_owned(),
            }),
            failed => {
                let failed = failed.result().map(|()| None);
                failed.map_err(|source| Error::driver("work on the GPU", source))
            }
        }
    }

    /// Answers search `number` of a layer with the slots of its experts `(k)`, after the copies to slots that were started with
    /// [`Device::load_slot_ahead`]. Then the compute stream continues.
    ///
    /// # Errors
    /// A copy cannot be started. Then [`Device::release`] is needed.
    pub(crate) fn answer(&mut self, layer: LayerId, number: u32, slots: &[u32]) -> Result<()> {
        use zerocopy::IntoBytes as _;
        let (Some(finder), Some(copies)) = (&mut self.finder, &self.slots) else {
            return Ok(());
        };
        let stream = copies.stream();
        finder.update(stream)?;
        upload_on(stream, finder.found(layer), slots.as_bytes())?;
        let flag = sys::CUstreamWriteValue_flags_enum::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: the word is in pinned memory that lives until the stream is idle. `upload_on` has made the context current.
        let written = unsafe {
            sys::cuStreamWriteValue32_v2(stream.cu_stream(), finder.word(layer, 0).0, number, flag)
        };
        written
            .result()
            .map_err(|source| Error::driver("a write after copies", source))
    }

    /// Lets the compute stream continue after search `number` of a layer, without slots for its experts.
    pub(crate) fn release(&self, layer: LayerId, number: u32) {
        if let Some(finder) = &self.finder {
            let at = layer.index() * finder.mail_bytes / size_of::<u32>();
            finder.mail.words()[at].store(number, Ordering::Release);
        }
    }
}
