//! Post-Fetch: while the host computes gate and up of the chosen experts, their down matrices travel to the GPU.
//!
//! A transfer begins when the router has chosen and ends before the product that needs it, or the host does that product.
//! Nothing is kept from layer to layer.

use std::fmt::{self, Display, Formatter};
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaEvent, CudaStream};

use super::clock::{Clock, Mark};
use super::{DeviceBuffer, Error, Gpu, Ptr, Result};

/// How Post-Fetch works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whether it works at all.
    pub enable: bool,
    /// Whether the host computes all the same, for comparison.
    pub force_cpu: bool,
    /// Whether a product waits for a transfer that is late; if not, the host does it.
    pub block_on_miss: bool,
    /// Transfers of a layer at most; the host does the experts beyond them.
    pub max_transfers: usize,
    /// Room for the transfers of a layer, bytes; none: what the largest layer's need.
    pub scratchpad_bytes: Option<usize>,
    /// Whether transfers have a stream of their own; if not, they stand in the way of what the GPU computes.
    pub dedicated_streams: bool,
    /// Chosen experts of a token whose gate and up the host computes; the GPU does those beyond. None: the host does all.
    pub cpu_limit: Option<usize>,
    /// What is made to fail, for tests.
    pub fault: Option<Fault>,
}

/// A step that is made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The scratchpad's allocation.
    Alloc,
    /// Every transfer.
    Copy,
    /// Every product with what was transferred.
    Kernel,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            enable: true,
            force_cpu: false,
            block_on_miss: true,
            max_transfers: 8,
            scratchpad_bytes: None,
            dedicated_streams: true,
            cpu_limit: None,
            fault: None,
        }
    }
}

/// What is known of the down matrix of one chosen expert. It goes from the first to the last within a layer, and is forgotten
/// after the layer's product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The host computes it.
    CpuOnly,
    /// It travels.
    CopyInFlight,
    /// It is there.
    GpuReady,
}

/// What has become of the down matrix of one chosen expert; displayed in words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// Layer.
    pub layer: usize,
    /// Expert.
    pub expert: i32,
    /// What it has come to.
    pub state: State,
}

impl Display for Transfer {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        let what = match self.state {
            State::CopyInFlight => "begins to travel",
            State::GpuReady => "is there",
            State::CpuOnly => "is late",
        };
        write!(f, "layer {} expert {} {what}", self.layer, self.expert)
    }
}

/// Called when a transfer begins, and when it has arrived or is late.
pub type Observer = Box<dyn FnMut(Transfer)>;

/// The down matrix of one chosen expert on its way.
struct Flight {
    expert: i32,
    to: Ptr,
    state: State,
    /// The moment behind its transfer; none before that began.
    arrived: Option<Mark>,
}

/// What one layer of one pass did.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Layer.
    pub layer: usize,
    /// Rows.
    pub n_tokens: usize,
    /// Distinct experts chosen.
    pub n_experts: usize,
    /// Of them, those whose down matrix the GPU computed.
    pub n_fetched: usize,
    /// Bytes that travelled.
    pub bytes: u64,
    /// Begin and end of the transfers.
    pub transfer: Option<(Instant, Instant)>,
    /// Begin and end of gate and up on the host.
    pub window: (Instant, Instant),
    /// Begin and end of the product on the GPU.
    pub product: Option<(Instant, Instant)>,
}

/// The layer that is under way.
struct Layer {
    il: usize,
    n_tokens: usize,
    n_experts: usize,
    n_fetched: usize,
    bytes: u64,
    /// Before the first and behind the last transfer.
    transfer: Option<(Mark, Mark)>,
    window: Option<(Instant, Instant)>,
    /// Around the product.
    product: Option<(Mark, Mark)>,
}

/// Post-Fetch on one GPU.
pub struct PostFetch {
    settings: Settings,
    /// The stream of transfers.
    stream: Arc<CudaStream>,
    pad: Option<DeviceBuffer>,
    /// Whether the last product has read the pad.
    pad_is_read: Option<CudaEvent>,
    clock: Clock,
    flights: Vec<Flight>,
    layers: Vec<Layer>,
    /// Told of every transfer.
    pub observer: Option<Observer>,
}

impl PostFetch {
    /// Streams for transfers on `gpu`; memory is taken when the first layer needs it.
    ///
    /// # Errors
    /// The driver has no stream left.
    pub fn new(gpu: &Gpu, settings: Settings) -> Result<PostFetch> {
        Ok(PostFetch {
            settings,
            stream: match settings.dedicated_streams {
                true => gpu.new_stream()?,
                false => gpu.stream().clone(),
            },
            pad: None,
            pad_is_read: None,
            clock: Clock::default(),
            flights: Vec::new(),
            layers: Vec::new(),
            observer: None,
        })
    }

    /// How it works.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Bytes of the scratchpad.
    pub fn pad_bytes(&self) -> usize {
        self.pad.as_ref().map_or(0, DeviceBuffer::size_bytes)
    }

    /// Begins a pass; nothing is under way.
    ///
    /// # Errors
    /// An event cannot be recorded.
    pub fn begin_pass(&mut self, gpu: &Gpu) -> Result<()> {
        self.layers.clear();
        self.clock.restart(gpu, &self.stream)
    }

    /// Begins the transfers of the chosen experts `ids` of layer `il`, whose down matrices `bytes_of` gives, each
    /// `expert_bytes` long. What cannot begin is left to the host; the first error is given.
    pub fn begin<'m>(
        &mut self,
        gpu: &Gpu,
        il: usize,
        ids: &[i32],
        n_tokens: usize,
        expert_bytes: usize,
        bytes_of: impl Fn(i32) -> &'m [u8],
    ) -> Option<Error> {
        self.flights.clear();
        for &expert in ids {
            if !self.flights.iter().any(|flight| flight.expert == expert) {
                self.flights.push(Flight {
                    expert,
                    to: Ptr::NULL,
                    state: State::CpuOnly,
                    arrived: None,
                });
            }
        }
        self.layers.push(Layer {
            il,
            n_tokens,
            n_experts: self.flights.len(),
            n_fetched: 0,
            bytes: 0,
            transfer: None,
            window: None,
            product: None,
        });
        if !self.settings.enable || self.settings.force_cpu {
            return None;
        }
        self.launch(gpu, expert_bytes, bytes_of).err()
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
        if let Some(read) = &self.pad_is_read {
            let waits = self.stream.wait(read);
            waits.map_err(|source| Error::driver("a wait between streams", source))?;
        }
        let first = self.clock.mark(gpu, &self.stream)?;
        for i in 0..fits {
            if self.settings.fault == Some(Fault::Copy) {
                return Err(Error::Injected { what: "a transfer" });
            }
            // Places follow one another: experts may differ in size from layer to layer.
            let to = pad.offset(i * expert_bytes);
            gpu.upload_on(&self.stream, to, bytes_of(self.flights[i].expert))?;
            let arrived = self.clock.mark(gpu, &self.stream)?;
            let flight = &mut self.flights[i];
            (flight.to, flight.state) = (to, State::CopyInFlight);
            flight.arrived = Some(arrived);
            if let Some(layer) = self.layers.last_mut() {
                layer.bytes += expert_bytes as u64;
                layer.transfer = Some((first, arrived));
            }
            self.tell(i);
        }
        Ok(())
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
        for i in 0..self.flights.len() {
            let flight = &self.flights[i];
            let (State::CopyInFlight, Some(arrived)) = (flight.state, flight.arrived) else {
                continue;
            };
            let arrived = self.clock.event(arrived);
            let ready = match self.settings.block_on_miss {
                true => {
                    gpu.kernels().follow_copy();
                    let waits = gpu.stream().wait(arrived);
                    waits.map_err(|source| Error::driver("a wait between streams", source))?;
                    true
                }
                false => {
                    let complete = arrived.try_is_complete();
                    complete.map_err(|source| Error::driver("a transfer", source))?
                }
            };
            self.flights[i].state = match ready {
                true => State::GpuReady,
                false => State::CpuOnly,
            };
            self.tell(i);
        }
        let there = |flight: &&Flight| flight.state == State::GpuReady;
        let n_fetched = self.flights.iter().filter(there).count();
        if let Some(layer) = self.layers.last_mut() {
            layer.n_fetched = n_fetched;
        }
        if self.settings.fault == Some(Fault::Kernel) {
            return Err(Error::Injected { what: "a product" });
        }
        let place = |id: &i32| {
            let flight = self.flights.iter().find(|flight| flight.expert == *id);
            let flight = flight.filter(|flight| flight.state == State::GpuReady);
            flight.map_or(0, |flight| flight.to.0)
        };
        Ok(ids.iter().map(place).collect())
    }

    /// The product on the GPU is about to be launched.
    ///
    /// # Errors
    /// An event cannot be recorded.
    pub fn begin_product(&mut self, gpu: &Gpu) -> Result<Mark> {
        self.clock.mark(gpu, gpu.stream())
    }

    /// The product that began at `from` has been launched; the pad may be overwritten behind it.
    ///
    /// # Errors
    /// An event cannot be recorded.
    pub fn end_product(&mut self, gpu: &Gpu, from: Mark) -> Result<()> {
        let to = self.clock.mark(gpu, gpu.stream())?;
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

    /// What the layers of this pass did, once both streams have come to its end.
    ///
    /// # Errors
    /// The GPU's work failed.
    pub fn samples(&self) -> Result<Vec<Sample>> {
        let waited = self.stream.synchronize();
        waited.map_err(|source| Error::driver("the transfers", source))?;
        let between = |marks: Option<(Mark, Mark)>| {
            let times = marks.map(|(from, to)| Ok((self.clock.time(from)?, self.clock.time(to)?)));
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
                transfer: between(layer.transfer)?,
                window,
                product: between(layer.product)?,
            });
        }
        Ok(samples)
    }

    /// The scratchpad and its bytes, with room for `wanted` if no size was set.
    fn pad(&mut self, gpu: &Gpu, wanted: usize) -> Result<(Ptr, usize)> {
        if self.settings.fault == Some(Fault::Alloc) {
            return Err(Error::Injected {
                what: "the scratchpad's allocation",
            });
        }
        let bytes = self.settings.scratchpad_bytes.unwrap_or(wanted);
        let pad = match self.pad.take() {
            Some(pad) if pad.size_bytes() >= bytes => pad,
            _ => {
                // Allocations come in the order of one stream, and another is about to write.
                let pad = gpu.alloc(bytes)?;
                gpu.synchronize()?;
                pad
            }
        };
        let place = (pad.ptr(), pad.size_bytes());
        self.pad = Some(pad);
        Ok(place)
    }

    /// Tells the observer what the transfer of a flight has come to.
    fn tell(&mut self, flight: usize) {
        let Flight { expert, state, .. } = self.flights[flight];
        let layer = self.layers.last().map_or(0, |layer| layer.il);
        if let Some(observer) = &mut self.observer {
            observer(Transfer {
                layer,
                expert,
                state,
            });
        }
    }
}
