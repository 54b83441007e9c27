//! A GPU as a session uses it: what lies there, what is computed there, and when.

mod describe;
mod scratch;
mod weights;

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

use cudarc::driver::CudaStream;

use super::clock::EventClock;
use super::download::{Download, Downloads};
use super::fetch::Staging;
use super::launch::Kernels;
use super::post_fetch::{self, Chosen, PostFetch, Sample, Settings};
use super::{DeviceBuffer, Error, Event, Fallbacks, Gpu, Pinned, Result, Wanted};
use crate::placement::{DeviceId, Placement};
use crate::recorder::Routing;
use crate::weights::Matrix;

pub use scratch::Scratch;
use weights::Resident;

/// A GPU as a session uses it. Weights are copied to it when they are first asked for.
pub struct Device {
    gpu: Gpu,
    placement: Rc<Placement>,
    /// By index in the GGUF's tensor table; none where there was no room.
    matrices: HashMap<u32, Option<Resident>>,
    vectors: HashMap<u32, DeviceBuffer>,
    scratch: [Option<DeviceBuffer>; Scratch::ALL],
    positions: Vec<u32>,
    /// Whether another device ran an operation, or the host waited, since the last event on the stream that computes.
    others_ran: bool,
    /// Whether all that was launched in the last pass has been waited for.
    pass_has_ended: bool,
    downloads: Downloads,
    staging: Staging,
    /// Transfers beside the host's work, with the policy that has them.
    post_fetch: Option<PostFetch>,
    /// Whether a transfer of the layer that is under way could not be started.
    transfers_failed: bool,
    /// Stacks copied to memory that the GPU reads by itself, where it does not read the model's files.
    pinned: HashMap<u32, Option<Pinned>>,
    /// Whether the GPU reads the model's files by itself.
    reads_files: bool,
    /// What went wrong and was done by the host.
    pub fallbacks: Fallbacks,
}

impl Device {
    /// A GPU on which the tensors live that `placement` puts there.
    pub(crate) fn new(gpu: Gpu, placement: Rc<Placement>) -> Device {
        Device {
            gpu,
            placement,
            matrices: HashMap::new(),
            vectors: HashMap::new(),
            scratch: [const { None }; Scratch::ALL],
            positions: Vec::new(),
            others_ran: false,
            pass_has_ended: false,
            post_fetch: None,
            transfers_failed: false,
            pinned: HashMap::new(),
            reads_files: false,
            downloads: Downloads::default(),
            staging: Staging::default(),
            fallbacks: Fallbacks::default(),
        }
    }

    /// Its place in the list of devices.
    pub fn id(&self) -> DeviceId {
        DeviceId::Gpu(self.gpu.index())
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

    /// Has the down matrices of chosen experts travel to it while the host computes the others.
    ///
    /// # Errors
    /// The driver has no stream left.
    pub(crate) fn enable_post_fetch(&mut self, settings: Settings) -> Result<()> {
        self.post_fetch = Some(PostFetch::new(&self.gpu, settings)?);
        Ok(())
    }

    /// The model's files were registered: the GPU reads them by itself.
    pub(crate) fn files_are_registered(&mut self) {
        self.reads_files = true;
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
            Some(post_fetch) => post_fetch.samples(&self.gpu),
            None => Ok(Vec::new()),
        };
        self.note_transfers();
        samples
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
        let pinned = if self.reads_files || self.post_fetch.is_none() {
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
        unsafe { post_fetch.begin(&self.gpu, &chosen, bytes_of) };
        self.note_transfers();
        true
    }

    /// Starts the transfers of this layer that have not been started, if there are any.
    pub(crate) fn start_transfers(&mut self) {
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.start_waiting(&self.gpu);
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
        let places = post_fetch.land(&self.gpu, ids);
        self.note_transfers();
        places
    }

    /// The product with what was transferred is about to be launched.
    ///
    /// # Errors
    /// An event cannot be recorded.
    pub(crate) fn begin_fetched_product(&mut self) -> Result<Event> {
        self.gpu.clock_mut().record(&self.gpu, self.gpu.stream())
    }

    /// The product that started at `start` has been launched; the scratchpad may be overwritten after it.
    ///
    /// # Errors
    /// An event cannot be recorded.
    pub(crate) fn end_fetched_product(&mut self, start: Event) -> Result<()> {
        match &mut self.post_fetch {
            Some(post_fetch) => post_fetch.end_product(&self.gpu, start),
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
        self.others_ran = false;
        self.gpu.clock_mut().restart(&self.gpu)
    }

    /// Ends a pass on this GPU: waits for all its work, and reads the GPU times of its events.
    ///
    /// # Errors
    /// Some of the work failed.
    pub(crate) fn end_pass(&mut self) -> Result<()> {
        self.gpu.synchronize()?;
        self.waited();
        if let Some(post_fetch) = &self.post_fetch {
            post_fetch.synchronize()?;
        }
        self.gpu.clock_mut().end()?;
        self.pass_has_ended = true;
        Ok(())
    }

    /// Finds the CPU times of the events of a pass that has [ended](Device::end_pass) on all `gpus` of the list.
    pub(crate) fn find_times(gpus: &[Device]) {
        let mut clocks: Vec<_> = gpus.iter().map(|gpu| gpu.gpu.clock_mut()).collect();
        EventClock::find_times(clocks.iter_mut().map(|clock| &mut **clock));
    }

    /// Records an event on the stream that computes.
    ///
    /// # Errors
    /// It cannot be created or recorded.
    pub(crate) fn record_event(&mut self) -> Result<Event> {
        let event = self.gpu.clock_mut().record(&self.gpu, self.gpu.stream())?;
        self.others_ran = false;
        Ok(event)
    }

    /// The event at which the operation that is launched next starts: the end of the one before it on this GPU, or a new event if
    /// another device ran something in between.
    ///
    /// # Errors
    /// As [`Device::record_event`].
    pub(crate) fn start_event(&mut self) -> Result<Event> {
        self.gpu.clock_mut().start_operation();
        let last = self.gpu.clock().last();
        match last {
            Some(event) if !self.others_ran => Ok(event),
            _ => self.record_event(),
        }
    }

    /// The events between which the operation ran that [starts](Device::start_event) at `from` and has been launched. If it read
    /// what another GPU had, it started when that had been copied.
    ///
    /// # Errors
    /// As [`Device::record_event`].
    pub(crate) fn end_events(&mut self, from: Event) -> Result<(Event, Event)> {
        let received = self.gpu.clock().received();
        Ok((received.unwrap_or(from), self.record_event()?))
    }

    /// Another device ran an operation: what this GPU gets next does not start at the end of what it got last.
    pub(crate) fn others_ran(&mut self) {
        self.others_ran = true;
    }

    /// The host waited for the stream that computes.
    pub(crate) fn waited(&mut self) {
        self.gpu.clock_mut().waited();
        self.others_ran = true;
    }

    /// When an event of the pass that ended last was, on the host's clock.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn time(&self, event: Event) -> Result<Instant> {
        self.gpu.clock().time(event)
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
