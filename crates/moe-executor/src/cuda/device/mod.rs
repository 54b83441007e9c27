//! The GPU as a session uses it: what lies there, what is computed there, and when.

mod describe;
mod scratch;
mod weights;

use std::collections::HashMap;
use std::time::Instant;

use cudarc::driver::CudaStream;

use super::clock::EventClock;
use super::download::{Download, Downloads};
use super::fetch::Staging;
use super::launch::Kernels;
use super::post_fetch::{self, Chosen, PostFetch, Sample, Settings};
use super::{
    DeviceBuffer, Error, Event, Fallbacks, Gpu, Pinned, Policy, Registered, Result, Wanted,
};
use crate::placement::Placement;
use crate::recorder::Routing;
use crate::weights::Matrix;

pub use scratch::Scratch;
use weights::Resident;

/// The GPU as a session uses it. Weights are copied to it when they are first asked for.
pub struct Device<'g> {
    gpu: Gpu,
    placement: Placement,
    /// By index in the GGUF's tensor table; none where there was no room.
    matrices: HashMap<u32, Option<Resident>>,
    vectors: HashMap<u32, DeviceBuffer>,
    scratch: [Option<DeviceBuffer>; Scratch::ALL],
    positions: Vec<u32>,
    clock: EventClock,
    /// Whether the host ran an operation, or waited, since the last event on the stream that computes.
    host_ran: bool,
    /// Whether all that was launched in the last pass has been waited for.
    pass_has_ended: bool,
    downloads: Downloads,
    staging: Staging,
    /// What becomes of experts that live with the host.
    policy: Policy,
    /// Transfers beside the host's work, with the policy that has them.
    post_fetch: Option<PostFetch>,
    /// Whether a transfer of the layer that is under way could not be started.
    transfers_failed: bool,
    /// Stacks whose file could not be registered, copied to memory that the GPU reads by itself.
    pinned: HashMap<u32, Option<Pinned>>,
    /// Rows of a product from which a matrix of the host is copied to the GPU for it.
    min_batch: Option<usize>,
    /// Files whose memory the GPU reads by itself.
    registered: Vec<Registered<'g>>,
    /// What went wrong and was done by the host.
    pub fallbacks: Fallbacks,
}

impl<'g> Device<'g> {
    /// A GPU on which the tensors live that `placement` says. For products of `min_batch` rows or more the others are copied
    /// to it, too (llama.cpp's `GGML_OP_OFFLOAD_MIN_BATCH`, 32 there).
    pub fn new(
        gpu: Gpu,
        placement: Placement,
        policy: Policy,
        min_batch: Option<usize>,
    ) -> Device<'g> {
        Device {
            gpu,
            placement,
            matrices: HashMap::new(),
            vectors: HashMap::new(),
            scratch: [const { None }; Scratch::ALL],
            positions: Vec::new(),
            clock: EventClock::default(),
            host_ran: false,
            pass_has_ended: false,
            policy,
            post_fetch: None,
            transfers_failed: false,
            pinned: HashMap::new(),
            min_batch,
            downloads: Downloads::default(),
            staging: Staging::default(),
            registered: Vec::new(),
            fallbacks: Fallbacks::default(),
        }
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The kernels.
    pub(crate) fn kernels(&self) -> &Kernels {
        self.gpu.kernels()
    }

    /// The stream that computes.
    pub(crate) fn stream(&self) -> &CudaStream {
        self.gpu.stream()
    }

    /// Where tensors live.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Has the down matrices of chosen experts travel while the host computes the others, with [`Policy::PostFetch`].
    ///
    /// # Errors
    /// The driver has no stream left.
    pub fn with_post_fetch(mut self, settings: Settings) -> Result<Device<'g>> {
        self.policy = Policy::PostFetch;
        self.post_fetch = Some(PostFetch::new(&self.gpu, settings)?);
        Ok(self)
    }

    /// Has `observer` told of every transfer of Post-Fetch.
    pub fn observe_transfers(&mut self, observer: post_fetch::Observer) {
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.observe(observer);
        }
    }

    /// What the layers of this pass transferred, once the pass is over.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn samples(&mut self) -> Result<Vec<Sample>> {
        let samples = match &self.post_fetch {
            Some(post_fetch) => post_fetch.samples(&self.clock),
            None => Ok(Vec::new()),
        };
        self.note_transfers();
        samples
    }

    /// Rows of a product from which a matrix of the host is copied to the GPU for it; none: never.
    pub fn min_batch(&self) -> Option<usize> {
        self.min_batch
    }

    /// How Post-Fetch works, if that is the policy.
    pub fn post_fetch_settings(&self) -> Option<&Settings> {
        self.post_fetch.as_ref().map(PostFetch::settings)
    }

    /// Bytes of the memory that transfers go to.
    pub fn scratchpad_bytes(&self) -> usize {
        self.post_fetch.as_ref().map_or(0, PostFetch::pad_bytes)
    }

    /// Begins the transfers of the chosen experts of a stack that lives with the host. Gives whether there are any: the
    /// policy, the number of rows and the type must allow it.
    pub(crate) fn begin_post_fetch(
        &mut self,
        il: usize,
        stack: &Matrix,
        ids: &[i32],
        tokens: usize,
    ) -> bool {
        // What went wrong in the layer before is not this one's.
        self.note_transfers();
        self.transfers_failed = false;
        let registered = !self.registered.is_empty();
        let pinned = if registered || self.post_fetch.is_none() {
            None
        } else {
            pinned_copy(&self.gpu, &mut self.pinned, stack)
        };
        let Some(post_fetch) = &mut self.post_fetch else {
            return false;
        };
        let size = stack.row_size * stack.n_out;
        let bytes_of = |expert: i32| match pinned {
            Some(copy) => &copy[expert as usize * size..][..size],
            None => stack.rows(expert as usize, 0..stack.n_out),
        };
        let chosen = Chosen {
            layer: il,
            ids,
            n_tokens: tokens,
            expert_bytes: size,
        };
        // SAFETY: a session borrows its model, whose mapped files outlive it; pinned copies are kept, and dropped after
        // `post_fetch`.
        unsafe { post_fetch.begin(&self.gpu, &mut self.clock, &chosen, bytes_of) };
        self.note_transfers();
        true
    }

    /// Starts the transfers of this layer that have not been started, if there are any.
    pub(crate) fn start_transfers(&mut self) {
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.start_waiting(&self.gpu, &mut self.clock);
        }
    }

    /// Where the down matrix of each entry of `ids` lies on the GPU, 0 where the host computes: see [`PostFetch::land`].
    ///
    /// # Errors
    /// A transfer failed: the host computes all.
    pub(crate) fn land_post_fetch(&mut self, ids: &[i32]) -> Result<Vec<u64>> {
        let Some(post_fetch) = &mut self.post_fetch else {
            return Ok(Vec::new());
        };
        let places = post_fetch.land(&self.gpu, &mut self.clock, ids);
        self.note_transfers();
        places
    }

    /// The product with what was transferred is about to be launched.
    ///
    /// # Errors
    /// An event cannot be recorded.
    pub(crate) fn begin_fetched_product(&mut self) -> Result<Event> {
        self.clock.record(&self.gpu, self.gpu.stream())
    }

    /// The product that started at `start` has been launched; the scratchpad may be overwritten after it.
    ///
    /// # Errors
    /// An event cannot be recorded.
    pub(crate) fn end_fetched_product(&mut self, start: Event) -> Result<()> {
        match &mut self.post_fetch {
            Some(post_fetch) => post_fetch.end_product(&self.gpu, &mut self.clock, start),
            None => Ok(()),
        }
    }

    /// The host computed gate and up of the layer from `start` to `end`.
    pub(crate) fn post_fetch_window(&mut self, start: Instant, end: Instant) {
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.window(start, end);
        }
    }

    /// Whether a transfer of the layer that was begun last could not be started.
    pub(crate) fn transfers_failed(&self) -> bool {
        self.transfers_failed
    }

    /// Counts that transfers could not be started, and keeps why.
    fn note_transfers(&mut self) {
        let post_fetch = self.post_fetch.as_mut();
        if let Some(error) = post_fetch.and_then(PostFetch::take_error) {
            self.transfers_failed = true;
            self.fallbacks.ops += 1;
            self.fallbacks.note(&error);
        }
    }

    /// What becomes of experts that live with the host.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Copies values to the host, and waits for them once.
    ///
    /// # Errors
    /// There is no memory, or the GPU failed, now or in what was launched before.
    pub(crate) fn fetch_together(&mut self, wanted: &mut [Wanted]) -> Result<()> {
        self.staging.fetch(&self.gpu, wanted)
    }

    /// Begins to copy a choice to the host, for the records; nobody waits for it before the pass is over.
    ///
    /// # Errors
    /// There is no memory, or the copy failed.
    pub(crate) fn begin_download(&mut self, routing: &mut Routing) -> Result<()> {
        let n = routing.ids.len();
        let ids = routing.ids.device(&self.gpu)?;
        let weights = routing.weights.device(&self.gpu)?;
        routing.copy = Some(self.downloads.begin(&self.gpu, ids, weights, n)?);
        Ok(())
    }

    /// Experts and weights that were copied in the pass that has ended.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn downloaded(&self, download: &Download) -> Result<(&[i32], &[f32])> {
        if !self.pass_has_ended {
            return Err(Error::PassNotEnded);
        }
        // SAFETY: the pass ended with a wait, and the next copy belongs to another pass.
        Ok(unsafe { self.downloads.get(download) })
    }

    /// Begins a pass; nothing is under way on the stream that computes.
    ///
    /// # Errors
    /// An event cannot be created or recorded, or a transfer of a pass before it failed.
    pub(crate) fn begin_pass(&mut self) -> Result<()> {
        self.downloads.clear();
        self.pass_has_ended = false;
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.begin_pass()?;
        }
        self.host_ran = false;
        self.clock.restart(&self.gpu)
    }

    /// Ends a pass: waits for all that was launched, and finds the times of its events.
    ///
    /// # Errors
    /// Some of it failed.
    pub(crate) fn end_pass(&mut self) -> Result<()> {
        self.gpu.synchronize()?;
        self.waited();
        if let Some(post_fetch) = &self.post_fetch {
            post_fetch.synchronize()?;
        }
        self.clock.finish()?;
        self.pass_has_ended = true;
        Ok(())
    }

    /// Records an event on the stream that computes.
    ///
    /// # Errors
    /// It cannot be created or recorded.
    pub(crate) fn record_event(&mut self) -> Result<Event> {
        let event = self.clock.record(&self.gpu, self.gpu.stream())?;
        self.host_ran = false;
        Ok(event)
    }

    /// The event at which the operation that is launched next starts: the end of the one before it on the GPU, or a new event if
    /// the host ran something in between.
    ///
    /// # Errors
    /// As [`Device::record_event`].
    pub(crate) fn start_event(&mut self) -> Result<Event> {
        match self.clock.last() {
            Some(event) if !self.host_ran => Ok(event),
            _ => self.record_event(),
        }
    }

    /// The host ran an operation.
    pub(crate) fn host_ran(&mut self) {
        self.host_ran = true;
    }

    /// The host waited for the stream that computes.
    pub(crate) fn waited(&mut self) {
        self.clock.waited();
        self.host_ran = true;
    }

    /// When an event of the pass that ended last was, on the host's clock.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn time(&self, event: Event) -> Result<Instant> {
        self.clock.time(event)
    }
}

/// A stack in memory that the GPU reads by itself, copied there when it is first asked for; none if there is no memory.
fn pinned_copy<'p>(
    gpu: &Gpu,
    pinned: &'p mut HashMap<u32, Option<Pinned>>,
    stack: &Matrix,
) -> Option<&'p [u8]> {
    let copy = pinned.entry(stack.place.tensor_idx).or_insert_with(|| {
        let mut copy = gpu.pinned(stack.all().len()).ok()?;
        // SAFETY: it is new: nothing copies from it or to it.
        unsafe { copy.write(stack.all()) };
        Some(copy)
    });
    // SAFETY: it is only copied from.
    copy.as_ref().map(|copy| unsafe { copy.bytes() })
}
