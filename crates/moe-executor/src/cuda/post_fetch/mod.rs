//! Post-Fetch: while the CPU computes gate and up of the selected experts, their down matrices are copied to the GPU. The method
//! is that of [llama-prefetch.cpp](https://github.com/ernestuz-b/llama-prefetch.cpp).
//!
//! A transfer starts after the routing decision and ends before the down product, or else the CPU computes that product. No
//! matrix is kept from layer to layer.
//!
//! ```text
//! session thread   start: allocate, 1st copy ──► publish gate job ──► other copies ──► gate, up ──► finish: ready copies
//! worker threads                                 gate ───────────────────────────────► gate, up
//! ```

mod copies;
mod pending;
mod settings;
mod transfer;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaEvent, CudaStream};

use super::{DeviceBuffer, Error, Event, Gpu, Ptr, Result};

use copies::Copies;
use pending::PendingCopy;
pub use settings::{InjectedFault, Settings};
pub use transfer::{Observer, Reason, Sample, State, Transfer};

/// The selected experts of a layer.
pub(crate) struct Selected<'a> {
    /// Layer.
    pub layer: usize,
    /// Experts `(n_tokens, k)`.
    pub ids: &'a [i32],
    /// Number of tokens.
    pub n_tokens: usize,
    /// Size of one down matrix in bytes.
    pub expert_bytes: usize,
}

/// Measurements of a layer of the current pass.
struct LayerTransfers {
    il: usize,
    n_tokens: usize,
    n_experts: usize,
    n_fetched: usize,
    /// Bytes of the started transfers.
    bytes: u64,
    /// Before the first transfer.
    start: Option<Event>,
    /// After the last transfer that was started.
    end: Option<Event>,
    /// Start and end of gate and up on the CPU.
    window: Option<(Instant, Instant)>,
    /// Start and end of the down product on the GPU.
    product: Option<(Event, Event)>,
}

/// Post-Fetch on one GPU.
pub(crate) struct PostFetch {
    settings: Settings,
    /// The stream of the transfers.
    stream: Arc<CudaStream>,
    /// Transfers of the current layer that have not been started.
    pending: VecDeque<PendingCopy>,
    /// Destination of the transfers.
    scratchpad: Option<DeviceBuffer>,
    /// The event after the last product that read the scratchpad.
    scratchpad_read: Option<CudaEvent>,
    copies: Copies,
    layers: Vec<LayerTransfers>,
    /// The first error since [`PostFetch::take_error`].
    error: Option<Error>,
}

impl PostFetch {
    /// Post-Fetch to `gpu`. The first layer allocates the scratchpad.
    ///
    /// # Errors
    /// The driver cannot create a stream.
    pub fn new(gpu: &Gpu, settings: Settings) -> Result<PostFetch> {
        let stream = if settings.dedicated_streams {
            gpu.new_stream()?
        } else {
            gpu.stream().clone()
        };
        Ok(PostFetch {
            settings,
            stream,
            pending: VecDeque::new(),
            scratchpad: None,
            scratchpad_read: None,
            copies: Copies::default(),
            layers: Vec::new(),
            error: None,
        })
    }

    /// Calls `observer` at every change of state of a transfer.
    pub fn observe(&mut self, observer: Observer) {
        self.copies.observer = Some(observer);
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Size of the scratchpad in bytes.
    pub fn scratchpad_bytes(&self) -> usize {
        self.scratchpad.as_ref().map_or(0, DeviceBuffer::size_bytes)
    }

    /// Removes and returns the first error of a transfer since the last call. The CPU computes the experts that it affects.
    pub fn take_error(&mut self) -> Option<Error> {
        self.error.take()
    }

    /// Starts a pass.
    ///
    /// # Errors
    /// A transfer of an earlier pass failed.
    pub fn begin_pass(&mut self) -> Result<()> {
        self.pending.clear();
        self.layers.clear();
        // A pass that failed did not wait for its transfers.
        self.synchronize()
    }

    /// Waits until all started transfers are complete.
    ///
    /// # Errors
    /// One of them failed.
    pub fn synchronize(&self) -> Result<()> {
        let waited = self.stream.synchronize();
        waited.map_err(|source| Error::driver("a transfer", source))
    }

    /// Starts the transfers of the selected experts, whose down matrices `bytes_of` returns. Experts whose transfer cannot start
    /// are left to the CPU.
    ///
    /// # Safety
    /// The returned bytes stay valid and unchanged until `self` is dropped.
    pub unsafe fn begin<'m>(
        &mut self,
        gpu: &Gpu,
        selected: &Selected,
        bytes_of: impl Fn(i32) -> &'m [u8],
    ) {
        // A layer that failed before its product may have left some.
        self.pending.clear();
        self.copies.start_layer(selected.layer, selected.ids);
        self.layers.push(LayerTransfers {
            il: selected.layer,
            n_tokens: selected.n_tokens,
            n_experts: self.copies.len(),
            n_fetched: 0,
            bytes: 0,
            start: None,
            end: None,
            window: None,
            product: None,
        });
        if self.settings.enable
            && !self.settings.force_cpu
            && let Err(error) = self.launch(gpu, selected.expert_bytes, bytes_of)
        {
            let all = 0..self.copies.len();
            self.copies.leave_to_cpu(all, Reason::NotStarted);
            self.error.get_or_insert(error);
        }
    }

    fn launch<'m>(
        &mut self,
        gpu: &Gpu,
        expert_bytes: usize,
        bytes_of: impl Fn(i32) -> &'m [u8],
    ) -> Result<()> {
        let n_all = self.copies.len();
        let wanted = n_all.min(self.settings.max_transfers);
        let (scratchpad, size) = self.scratchpad(gpu, wanted * expert_bytes)?;
        let fits = wanted.min(size / expert_bytes.max(1));
        self.copies.leave_to_cpu(fits..wanted, Reason::NoRoom);
        self.copies.leave_to_cpu(wanted..n_all, Reason::OverLimit);
        if let Some(read) = &self.scratchpad_read {
            let waits = self.stream.wait(read);
            waits.map_err(|source| Error::driver("a wait between streams", source))?;
        }
        let start = gpu.clock_mut().record(gpu, &self.stream)?;
        if let Some(layer) = self.layers.last_mut() {
            layer.start = Some(start);
        }
        let mut pending = VecDeque::with_capacity(fits);
        for i in 0..fits {
            // Contiguous, without fixed slots: the size of experts may differ from layer to layer.
            let to = scratchpad.offset(i * expert_bytes);
            let end = gpu.clock_mut().reserve(gpu)?;
            let bytes = bytes_of(self.copies.assign(i, to, end));
            let fails = match self.settings.fault {
                Some(InjectedFault::Copy) => true,
                Some(InjectedFault::LaterCopy) => i > 0,
                _ => false,
            };
            // SAFETY: the caller of `begin` ensures that the bytes stay valid. The scratchpad has room for `fits` experts, and it
            // is not replaced before the transfers have ended.
            pending.push_back(unsafe { PendingCopy::new(i, bytes, to, end, fails) });
        }
        self.copies.queue(0..fits);
        self.pending = pending;
        if self.settings.dedicated_streams {
            // PCIe is busy until the other transfers are started.
            self.start_next(gpu, 1);
        } else {
            // The next kernel on the compute stream must start after all of them.
            gpu.follow_copy();
            self.start_next(gpu, fits);
        }
        Ok(())
    }

    /// Starts the pending transfers. Starting eight of them takes about 30 µs, so this is called while other threads compute gate
    /// and up.
    pub fn start_pending(&mut self, gpu: &Gpu) {
        self.start_next(gpu, self.pending.len());
    }

    /// Starts the next `n` transfers. If one cannot be started, it and all later ones are left to the CPU.
    fn start_next(&mut self, gpu: &Gpu, n: usize) {
        for _ in 0..n {
            let Some(copy) = self.pending.pop_front() else {
                return;
            };
            if let Err(error) = copy.start(gpu, &self.stream) {
                self.error.get_or_insert(error);
                let end = copy.index + 1 + self.pending.len();
                self.copies
                    .leave_to_cpu(copy.index..end, Reason::NotStarted);
                self.pending.clear();
                return;
            }
            if let Some(layer) = self.layers.last_mut() {
                layer.bytes += copy.size_bytes();
                layer.end = Some(copy.end);
            }
        }
    }

    /// Notes that the CPU computed gate and up from `start` to `end`.
    pub fn window(&mut self, start: Instant, end: Instant) {
        if let Some(layer) = self.layers.last_mut() {
            layer.window = Some((start, end));
        }
    }

    /// Address on the GPU of the down matrix of each entry of `ids`; 0 if the CPU computes it. The compute stream waits for
    /// transfers that are not complete, or they are missed ([`Settings::block_on_miss`]).
    ///
    /// # Errors
    /// A transfer failed: the CPU computes all experts.
    pub fn finish(&mut self, gpu: &Gpu, ids: &[i32]) -> Result<Vec<u64>> {
        self.start_pending(gpu);
        let waits = self.settings.block_on_miss;
        let clock = gpu.clock();
        self.copies.finish(|end| {
            let Some(end) = clock.cuda_event(end) else {
                return Ok(false);
            };
            if !waits {
                let complete = end.try_is_complete();
                return complete.map_err(|source| Error::driver("a transfer", source));
            }
            gpu.follow_copy();
            let waits = gpu.stream().wait(end);
            waits.map_err(|source| Error::driver("a wait between streams", source))?;
            Ok(true)
        })?;
        if let Some(layer) = self.layers.last_mut() {
            layer.n_fetched = self.copies.n_ready();
        }
        if self.settings.fault == Some(InjectedFault::Kernel) {
            return Err(Error::Injected { what: "a product" });
        }
        let addresses = ids.iter().map(|&id| self.copies.address(id).0);
        Ok(addresses.collect())
    }

    /// Records the end of the product that started at `start` and has been launched. After it, the scratchpad may be overwritten.
    ///
    /// # Errors
    /// The driver cannot record an event.
    pub fn end_product(&mut self, gpu: &Gpu, start: Event) -> Result<()> {
        let end = gpu.clock_mut().next_start(gpu)?;
        gpu.end_operation();
        if let Some(layer) = self.layers.last_mut() {
            layer.product = Some((start, end));
        }
        let read = match self.scratchpad_read.take() {
            Some(event) => event,
            None => gpu.event()?,
        };
        let recorded = read.record(gpu.stream());
        self.scratchpad_read = Some(read);
        recorded.map_err(|source| Error::driver("recording an event", source))
    }

    /// Measurements of each layer of the pass that has ended.
    ///
    /// # Errors
    /// [`Error::PassNotEnded`].
    pub fn samples(&self, gpu: &Gpu) -> Result<Vec<Sample>> {
        let clock = gpu.clock();
        let between = |events: Option<(Event, Event)>| {
            let times = events.map(|(from, to)| Ok((clock.time(from)?, clock.time(to)?)));
            times.transpose()
        };
        let mut samples = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let Some(window) = layer.window else {
                continue;
            };
            let fetched = if layer.product.is_some() {
                layer.n_fetched
            } else {
                0
            };
            samples.push(Sample {
                layer: layer.il,
                n_tokens: layer.n_tokens,
                n_experts: layer.n_experts,
                n_fetched: fetched,
                bytes: layer.bytes,
                transfer: between(layer.start.zip(layer.end))?,
                window,
                product: between(layer.product)?,
            });
        }
        Ok(samples)
    }

    /// Address and size of the scratchpad, which has at least `wanted` bytes unless the settings fix its size.
    fn scratchpad(&mut self, gpu: &Gpu, wanted: usize) -> Result<(Ptr, usize)> {
        if self.settings.fault == Some(InjectedFault::Alloc) {
            return Err(Error::Injected {
                what: "allocating the scratchpad",
            });
        }
        let bytes = self.settings.scratchpad_bytes.unwrap_or(wanted);
        let scratchpad = match self.scratchpad.take() {
            Some(scratchpad) if scratchpad.size_bytes() >= bytes => scratchpad,
            outgrown => {
                // Memory is freed and allocated in the order of the compute stream. The transfer stream may still write to the
                // old buffer, and soon writes to the new one.
                let waited = self.stream.synchronize();
                waited.map_err(|source| Error::driver("a transfer", source))?;
                // The old buffer is freed first: both at once may not fit.
                drop(outgrown);
                let scratchpad = gpu.alloc(bytes)?;
                gpu.synchronize()?;
                scratchpad
            }
        };
        let range = (scratchpad.ptr(), scratchpad.size_bytes());
        self.scratchpad = Some(scratchpad);
        Ok(range)
    }
}

impl Drop for PostFetch {
    fn drop(&mut self) {
        // The compute stream frees the scratchpad, and transfers on the other stream may still write to it.
        let _ = self.stream.synchronize();
    }
}
