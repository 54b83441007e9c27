//! Post-Fetch: while the host computes gate and up of the chosen experts, their down matrices travel to the GPU.
//!
//! A transfer begins when the router has chosen and ends before the product that needs it, or the host does that product.
//! Nothing is kept from layer to layer.
//!
//! ```text
//! session's thread   begin: room, 1st copy ──► gate published ──► the other copies ──► gate, up ──► land: what arrived
//! other threads                                gate ───────────────────────────────► gate, up
//! ```

mod flights;
mod order;
mod settings;
mod transfer;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaEvent, CudaStream};

use super::{DeviceBuffer, Error, Event, Gpu, Ptr, Result};

use flights::Flights;
use order::CopyOrder;
pub use settings::{InjectedFault, Settings};
pub use transfer::{Observer, Reason, Sample, State, Transfer};

/// Experts that a layer chose and whose down matrices are to be transferred.
pub(crate) struct Chosen<'a> {
    /// Layer.
    pub layer: usize,
    /// Expert of each row and slot.
    pub ids: &'a [i32],
    /// Rows.
    pub n_tokens: usize,
    /// Bytes of one down matrix.
    pub expert_bytes: usize,
}

/// The layer that is under way, or one before it in the pass.
struct LayerCopies {
    il: usize,
    n_tokens: usize,
    n_experts: usize,
    n_fetched: usize,
    /// Bytes of the transfers that were started.
    bytes: u64,
    /// Before the first transfer.
    departure: Option<Event>,
    /// Behind the last one that was started.
    arrival: Option<Event>,
    window: Option<(Instant, Instant)>,
    /// Around the product.
    product: Option<(Event, Event)>,
}

/// Post-Fetch on one GPU.
pub(crate) struct PostFetch {
    settings: Settings,
    /// The stream of transfers.
    stream: Arc<CudaStream>,
    /// Transfers of the layer that are yet to be started.
    waiting: VecDeque<CopyOrder>,
    pad: Option<DeviceBuffer>,
    /// Whether the last product has read the pad.
    pad_is_read: Option<CudaEvent>,
    flights: Flights,
    layers: Vec<LayerCopies>,
    /// The first error that nobody has asked for.
    error: Option<Error>,
}

impl PostFetch {
    /// Streams for transfers on `gpu`; memory is taken when the first layer needs it.
    ///
    /// # Errors
    /// The driver has no stream left.
    pub fn new(gpu: &Gpu, settings: Settings) -> Result<PostFetch> {
        let stream = if settings.dedicated_streams {
            gpu.new_stream()?
        } else {
            gpu.stream().clone()
        };
        Ok(PostFetch {
            settings,
            stream,
            waiting: VecDeque::new(),
            pad: None,
            pad_is_read: None,
            flights: Flights::default(),
            layers: Vec::new(),
            error: None,
        })
    }

    /// Has `observer` told of every transfer.
    pub fn observe(&mut self, observer: Observer) {
        self.flights.observer = Some(observer);
    }

    /// How it works.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Bytes of the scratchpad.
    pub fn pad_bytes(&self) -> usize {
        self.pad.as_ref().map_or(0, DeviceBuffer::size_bytes)
    }

    /// The first error of a transfer since this was asked last: the host has computed what could not travel.
    pub fn take_error(&mut self) -> Option<Error> {
        self.error.take()
    }

    /// Begins a pass.
    ///
    /// # Errors
    /// A transfer of a pass before it failed.
    pub fn begin_pass(&mut self) -> Result<()> {
        self.waiting.clear();
        self.layers.clear();
        // A pass that failed has waited for no transfer.
        self.synchronize()
    }

    /// Waits for all transfers.
    ///
    /// # Errors
    /// One of them failed.
    pub fn synchronize(&self) -> Result<()> {
        let waited = self.stream.synchronize();
        waited.map_err(|source| Error::driver("the transfers", source))
    }

    /// Begins the transfers of the chosen experts, whose down matrices `bytes_of` returns. What cannot begin is left to the
    /// host.
    ///
    /// # Safety
    /// The bytes stay as they are while this lives.
    pub unsafe fn begin<'m>(
        &mut self,
        gpu: &Gpu,
        chosen: &Chosen,
        bytes_of: impl Fn(i32) -> &'m [u8],
    ) {
        // Those of a layer that failed before its product.
        self.waiting.clear();
        self.flights.choose(chosen.layer, chosen.ids);
        self.layers.push(LayerCopies {
            il: chosen.layer,
            n_tokens: chosen.n_tokens,
            n_experts: self.flights.len(),
            n_fetched: 0,
            bytes: 0,
            departure: None,
            arrival: None,
            window: None,
            product: None,
        });
        if self.settings.enable
            && !self.settings.force_cpu
            && let Err(error) = self.launch(gpu, chosen.expert_bytes, bytes_of)
        {
            self.flights.stay(0..self.flights.len(), Reason::NotStarted);
            self.error.get_or_insert(error);
        }
    }

    fn launch<'m>(
        &mut self,
        gpu: &Gpu,
        expert_bytes: usize,
        bytes_of: impl Fn(i32) -> &'m [u8],
    ) -> Result<()> {
        let wanted = self.flights.len().min(self.settings.max_transfers);
        let (pad, room) = self.pad(gpu, wanted * expert_bytes)?;
        let fits = wanted.min(room / expert_bytes.max(1));
        self.flights.stay(fits..wanted, Reason::NoRoom);
        self.flights
            .stay(wanted..self.flights.len(), Reason::Beyond);
        if let Some(read) = &self.pad_is_read {
            let waits = self.stream.wait(read);
            waits.map_err(|source| Error::driver("a wait between streams", source))?;
        }
        let departure = gpu.clock_mut().record(gpu, &self.stream)?;
        if let Some(layer) = self.layers.last_mut() {
            layer.departure = Some(departure);
        }
        let mut orders = VecDeque::with_capacity(fits);
        for i in 0..fits {
            // Places follow one another: experts may differ in size from layer to layer.
            let to = pad.offset(i * expert_bytes);
            let arrived = gpu.clock_mut().reserve(gpu)?;
            let bytes = bytes_of(self.flights.plan(i, to, arrived));
            let fails = match self.settings.fault {
                Some(InjectedFault::Copy) => true,
                Some(InjectedFault::LaterCopy) => i > 0,
                _ => false,
            };
            // SAFETY: so asks `begin`.
            orders.push_back(unsafe { CopyOrder::new(i, bytes, to, arrived, fails) });
        }
        self.flights.depart(0..fits);
        self.waiting = orders;
        if self.settings.dedicated_streams {
            // The link has something to do until the others begin.
            self.start_next(gpu, 1);
        } else {
            // In the order of the one stream: what the GPU computes next comes behind them.
            gpu.kernels().follow_copy();
            self.start_next(gpu, fits);
        }
        Ok(())
    }

    /// Starts the transfers that wait: to be called once other threads are at work on gate and up, since starting eight takes
    /// some 30 µs.
    pub fn start_waiting(&mut self, gpu: &Gpu) {
        self.start_next(gpu, self.waiting.len());
    }

    /// Starts the next `n` transfers. Behind one that fails none is started: the host computes it and those that wait.
    fn start_next(&mut self, gpu: &Gpu, n: usize) {
        for _ in 0..n {
            let Some(order) = self.waiting.pop_front() else {
                return;
            };
            if let Err(error) = order.start(gpu, &self.stream) {
                self.error.get_or_insert(error);
                let end = order.flight + 1 + self.waiting.len();
                self.flights.stay(order.flight..end, Reason::NotStarted);
                self.waiting.clear();
                return;
            }
            if let Some(layer) = self.layers.last_mut() {
                layer.bytes += order.size_bytes();
                layer.arrival = Some(order.arrived);
            }
        }
    }

    /// The host computed gate and up from `begin` to `end`.
    pub fn window(&mut self, begin: Instant, end: Instant) {
        if let Some(layer) = self.layers.last_mut() {
            layer.window = Some((begin, end));
        }
    }

    /// Where the down matrix of each entry of `ids` lies on the GPU; [`Ptr::NULL`] where the host computes. What has not
    /// arrived is waited for, or missed.
    ///
    /// # Errors
    /// A transfer failed: the host computes all.
    pub fn land(&mut self, gpu: &Gpu, ids: &[i32]) -> Result<Vec<u64>> {
        self.start_waiting(gpu);
        let waits = self.settings.block_on_miss;
        let clock = gpu.clock();
        self.flights.land(|arrived| {
            let arrived = clock.event(arrived);
            if !waits {
                let complete = arrived.try_is_complete();
                return complete.map_err(|source| Error::driver("a transfer", source));
            }
            gpu.kernels().follow_copy();
            let waits = gpu.stream().wait(arrived);
            waits.map_err(|source| Error::driver("a wait between streams", source))?;
            Ok(true)
        })?;
        if let Some(layer) = self.layers.last_mut() {
            layer.n_fetched = self.flights.n_there();
        }
        if self.settings.fault == Some(InjectedFault::Kernel) {
            return Err(Error::Injected { what: "a product" });
        }
        Ok(ids.iter().map(|&id| self.flights.place(id).0).collect())
    }

    /// The product that started at `from` has been launched; the pad may be overwritten after it.
    ///
    /// # Errors
    /// An event cannot be recorded.
    pub fn end_product(&mut self, gpu: &Gpu, from: Event) -> Result<()> {
        let to = gpu.clock_mut().record(gpu, gpu.stream())?;
        if let Some(layer) = self.layers.last_mut() {
            layer.product = Some((from, to));
        }
        let read = match self.pad_is_read.take() {
            Some(event) => event,
            None => gpu.event()?,
        };
        let recorded = read.record(gpu.stream());
        self.pad_is_read = Some(read);
        recorded.map_err(|source| Error::driver("an event", source))
    }

    /// What the layers of this pass did, once it has ended.
    ///
    /// # Errors
    /// It has not.
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
                transfer: between(layer.departure.zip(layer.arrival))?,
                window,
                product: between(layer.product)?,
            });
        }
        Ok(samples)
    }

    /// The scratchpad and its bytes, with room for `wanted` if no size was set.
    fn pad(&mut self, gpu: &Gpu, wanted: usize) -> Result<(Ptr, usize)> {
        if self.settings.fault == Some(InjectedFault::Alloc) {
            return Err(Error::Injected {
                what: "the scratchpad's allocation",
            });
        }
        let bytes = self.settings.scratchpad_bytes.unwrap_or(wanted);
        let pad = match self.pad.take() {
            Some(pad) if pad.size_bytes() >= bytes => pad,
            outgrown => {
                // Allocations come and go in the order of one stream; another may still write to what goes, and is about to
                // write to what comes.
                let waited = self.stream.synchronize();
                waited.map_err(|source| Error::driver("the transfers", source))?;
                // Both at once may not fit.
                drop(outgrown);
                let pad = gpu.alloc(bytes)?;
                gpu.synchronize()?;
                pad
            }
        };
        let place = (pad.ptr(), pad.size_bytes());
        self.pad = Some(pad);
        Ok(place)
    }
}

impl Drop for PostFetch {
    fn drop(&mut self) {
        // Transfers write to the pad, which goes in the order of another stream.
        let _ = self.stream.synchronize();
    }
}
