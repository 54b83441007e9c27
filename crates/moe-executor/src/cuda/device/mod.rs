//! A GPU as a session uses it: the weights and scratch memory on it, its transfers, and the times of its operations.

mod describe;
mod finder;
mod hot;
mod lane_sum;
mod runs;
mod scratch;
mod slots;
mod weights;

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

use cudarc::driver::CudaStream;

use super::clock::EventClock;
use super::download::{Download, Downloads};
use super::launch::Kernels;
use super::post_fetch::{self, PostFetch, Sample, Selected, Settings};
use super::staging::StagingBuffer;
use super::{DeviceBuffer, Error, Event, Fallbacks, Gpu, Pinned, Ptr, Result, Wanted};
use crate::device_id::DeviceId;
use crate::placement::Placement;
use crate::recorder::Routing;
use crate::weights::Matrix;

pub(crate) use finder::Found;
pub use scratch::Scratch;
use weights::Resident;

/// A GPU as a session uses it. Weights are copied to it at their first use.
pub struct Device {
    gpu: Gpu,
    placement: Rc<Placement>,
    /// By index in the tensor table of the GGUF file; `None` if the matrix did not fit.
    matrices: HashMap<u32, Option<Resident>>,
    vectors: HashMap<u32, DeviceBuffer>,
    /// Searches for slots of the dynamic cache; `None` if the CPU finds them.
    finder: Option<finder::Finder>,
    /// Copies to the slots of the dynamic cache. Dropped before the slots: the drop waits for the copies.
    slots: Option<slots::SlotCopies>,
    /// Experts of the hot cache.
    hot: hot::HotExperts,
    lane_sum: lane_sum::LaneSum,
    run_list: runs::RunList,
    scratch: [Option<DeviceBuffer>; Scratch::COUNT],
    /// The contents of [`Scratch::Places`].
    places: Vec<u32>,
    /// The contents of [`Scratch::HeadNumbers`]: number of heads, and number of rows.
    head_numbers: (usize, usize),
    /// The end of the last operation on this GPU, if no other device ran an operation since, nor the CPU waited: then the next
    /// operation starts there.
    previous_end: Option<Event>,
    /// Whether the last pass has ended: all its work is complete.
    pass_has_ended: bool,
    downloads: Downloads,
    staging: StagingBuffer,
    /// Transfers that overlap with work of the CPU, if the policy is Post-Fetch.
    post_fetch: Option<PostFetch>,
    /// Whether a transfer of the current layer could not be started.
    transfers_failed: bool,
    /// Pinned copies of matrices, if the files of the model are not registered. By index in the tensor table; `None` if the
    /// allocation failed.
    pinned: HashMap<u32, Option<Pinned>>,
    /// Whether the files of the model are registered, so that the GPU reads them directly.
    reads_files: bool,
    /// Operations and tensors that were left to the CPU.
    pub fallbacks: Fallbacks,
}

impl Device {
    /// A GPU that holds the tensors that `placement` assigns to it.
    pub(crate) fn new(gpu: Gpu, placement: Rc<Placement>) -> Device {
        Device {
            gpu,
            placement,
            matrices: HashMap::new(),
            vectors: HashMap::new(),
            hot: hot::HotExperts::default(),
            slots: None,
            finder: None,
            lane_sum: lane_sum::LaneSum::default(),
            run_list: runs::RunList::default(),
            scratch: [const { None }; Scratch::COUNT],
            places: Vec::new(),
            head_numbers: (0, 0),
            previous_end: None,
            pass_has_ended: false,
            post_fetch: None,
            transfers_failed: false,
            pinned: HashMap::new(),
            reads_files: false,
            downloads: Downloads::default(),
            staging: StagingBuffer::default(),
            fallbacks: Fallbacks::default(),
        }
    }

    /// Its id in the list of devices.
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

    /// The compute stream, for launches.
    pub(crate) fn stream(&self) -> &CudaStream {
        self.gpu.launch_stream()
    }

    /// Enables Post-Fetch: the down matrices of selected experts are copied to this GPU while the CPU computes gate and up.
    ///
    /// # Errors
    /// The driver cannot create a stream.
    pub(crate) fn enable_post_fetch(&mut self, settings: Settings) -> Result<()> {
        self.post_fetch = Some(PostFetch::new(&self.gpu, settings)?);
        Ok(())
    }

    /// Notes that the files of the model are registered: the GPU reads them directly.
    pub(crate) fn files_are_registered(&mut self) {
        self.reads_files = true;
    }

    /// Calls `observer` at every change of state of a Post-Fetch transfer.
    pub fn observe_transfers(&mut self, observer: post_fetch::Observer) {
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.observe(observer);
        }
    }

    /// The Post-Fetch transfers of each layer in the pass that has ended.
    ///
    /// # Errors
    /// [`Error::PassNotEnded`].
    pub(crate) fn samples(&mut self) -> Result<Vec<Sample>> {
        let samples = match &self.post_fetch {
            Some(post_fetch) => post_fetch.samples(&self.gpu),
            None => Ok(Vec::new()),
        };
        self.note_transfers();
        samples
    }

    /// Settings of Post-Fetch, if it is enabled.
    pub fn post_fetch_settings(&self) -> Option<&Settings> {
        self.post_fetch.as_ref().map(PostFetch::settings)
    }

    /// Size of the Post-Fetch scratchpad in bytes.
    pub fn scratchpad_bytes(&self) -> usize {
        self.post_fetch
            .as_ref()
            .map_or(0, PostFetch::scratchpad_bytes)
    }

    /// Starts the Post-Fetch transfers of layer `il`: the matrices of the selected experts `ids` `(tokens, k)` of `stack`, which
    /// is in CPU memory. Returns `false` if Post-Fetch is not enabled.
    pub(crate) fn begin_post_fetch(
        &mut self,
        il: usize,
        stack: &Matrix,
        ids: &[i32],
        tokens: usize,
    ) -> bool {
        // Errors of the previous layer do not count for this one.
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
        let selected = Selected {
            layer: il,
            ids,
            n_tokens: tokens,
            expert_bytes: size,
        };
        // SAFETY: the session borrows the model, so the mapped files outlive it. `self.pinned` keeps its copies, and is dropped
        // after `self.post_fetch`, whose `drop` waits for its transfers.
        unsafe { post_fetch.begin(&self.gpu, &selected, bytes_of) };
        self.note_transfers();
        true
    }

    /// Starts the remaining transfers of this layer.
    pub(crate) fn start_transfers(&mut self) {
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.start_pending(&self.gpu);
        }
    }

    /// Address on the GPU of the down matrix of each entry of `ids`; 0 if the CPU computes it. See [`PostFetch::finish`].
    ///
    /// # Errors
    /// A transfer failed: the CPU computes all experts.
    pub(crate) fn finish_transfers(&mut self, ids: &[i32]) -> Result<Vec<u64>> {
        let Some(post_fetch) = &mut self.post_fetch else {
            return Ok(Vec::new());
        };
        let addresses = post_fetch.finish(&self.gpu, ids);
        self.note_transfers();
        addresses
    }

    /// Records the start of the product with the transferred matrices, which is launched next.
    ///
    /// # Errors
    /// The driver cannot record an event.
    pub(crate) fn begin_fetched_product(&mut self) -> Result<Event> {
        self.gpu.clock_mut().next_start(&self.gpu)
    }

    /// Records the end of the product that started at `start` and has been launched. After it, the scratchpad may be overwritten.
    ///
    /// # Errors
    /// The driver cannot record an event.
    pub(crate) fn end_fetched_product(&mut self, start: Event) -> Result<()> {
        match &mut self.post_fetch {
            Some(post_fetch) => post_fetch.end_product(&self.gpu, start),
            None => Ok(()),
        }
    }

    /// Notes that the CPU computed gate and up of the layer from `start` to `end`.
    pub(crate) fn post_fetch_window(&mut self, start: Instant, end: Instant) {
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.window(start, end);
        }
    }

    /// Whether a transfer of the current layer could not be started.
    pub(crate) fn transfers_failed(&self) -> bool {
        self.transfers_failed
    }

    /// Counts a failure to start transfers, and keeps its error.
    fn note_transfers(&mut self) {
        let post_fetch = self.post_fetch.as_mut();
        if let Some(error) = post_fetch.and_then(PostFetch::take_error) {
            self.transfers_failed = true;
            self.fallbacks.ops += 1;
            self.fallbacks.note(&error);
        }
    }

    /// Copies values to the CPU with one wait.
    ///
    /// # Errors
    /// Pinned memory cannot be allocated, or the GPU failed in a copy or in earlier work.
    pub(crate) fn fetch_together(&mut self, wanted: &mut [Wanted]) -> Result<()> {
        self.staging.fetch(&self.gpu, wanted)
    }

    /// Reserves a part of the log of routing decisions for `n` selected experts and their weights. Returns its address and its copy,
    /// which is complete when the pass has ended; `None` without room.
    pub(crate) fn reserve_log(&mut self, n: usize) -> Option<(Ptr, Download)> {
        self.downloads.reserve(&self.gpu, n)
    }

    /// Starts the D2H copy of a routing decision for the records. It is complete when the pass has ended.
    ///
    /// # Errors
    /// Memory cannot be allocated, or the copy cannot be started.
    pub(crate) fn begin_download(&mut self, routing: &mut Routing) -> Result<()> {
        let n = routing.ids.len();
        let ids = routing.ids.device(&self.gpu)?;
        let weights = routing.weights.device(&self.gpu)?;
        routing.copy = Some(self.downloads.copy(&self.gpu, ids, Some(weights), n)?);
        Ok(())
    }

    /// Starts the D2H copy of selected experts without their weights. It is complete when the pass has ended.
    ///
    /// # Errors
    /// As [`Device::begin_download`].
    pub(crate) fn begin_id_download(&mut self, routing: &mut Routing) -> Result<Download> {
        let n = routing.ids.len();
        let ids = routing.ids.device(&self.gpu)?;
        self.downloads.copy(&self.gpu, ids, None, n)
    }

    /// Selected experts and their weights that were copied in the pass that has ended.
    ///
    /// # Errors
    /// [`Error::PassNotEnded`].
    pub(crate) fn downloaded(&self, download: &Download) -> Result<(&[i32], &[f32])> {
        if !self.pass_has_ended {
            return Err(Error::PassNotEnded);
        }
        // SAFETY: the pass ended with a wait, and copies are only started within a pass.
        Ok(unsafe { self.downloads.get(download) })
    }

    /// Starts a pass; see [`Gpu::begin_pass`]. The compute stream must be idle.
    ///
    /// # Errors
    /// The driver cannot create or record an event, or a transfer of an earlier pass failed.
    pub(crate) fn begin_pass(&mut self, n_tokens: usize, repeats: bool) -> Result<()> {
        self.gpu.begin_pass(n_tokens, repeats);
        self.downloads.clear();
        self.pass_has_ended = false;
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.begin_pass()?;
        }
        self.gpu.clock_mut().restart(&self.gpu)?;
        self.previous_end = None;
        Ok(())
    }

    /// Starts the copies of the starts of kernels and of routing decisions, unless everything so far is copied.
    ///
    /// # Errors
    /// The driver reports an error.
    pub(crate) fn copy_recorded(&mut self) -> Result<()> {
        self.gpu.clock_mut().copy_starts(&self.gpu)?;
        self.downloads.copy_log(&self.gpu)
    }

    /// Ends a pass on this GPU: waits for all its work, and reads the GPU times of its events.
    ///
    /// # Errors
    /// Some of the work failed.
    pub(crate) fn end_pass(&mut self) -> Result<()> {
        self.copy_recorded()?;
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

    /// The time at which all work on the compute stream so far is complete.
    ///
    /// # Errors
    /// The driver cannot create or record an event.
    pub(crate) fn record_event(&mut self) -> Result<Event> {
        let event = self.gpu.clock_mut().next_start(&self.gpu)?;
        self.previous_end = Some(event);
        Ok(event)
    }

    /// The event at which the next operation starts: the end of the previous one on this GPU, or a new event if another device
    /// ran an operation in between.
    ///
    /// # Errors
    /// As [`Device::record_event`].
    pub(crate) fn start_event(&mut self) -> Result<Event> {
        self.gpu.clock_mut().start_operation();
        match self.previous_end {
            Some(event) => Ok(event),
            None => self.record_event(),
        }
    }

    /// Start and end of the operation that was launched after [`Device::start_event`] returned `from`. If the operation reads
    /// copies from other GPUs, it starts after the last of these copies.
    ///
    /// # Errors
    /// As [`Device::record_event`].
    pub(crate) fn end_events(&mut self, from: Event) -> Result<(Event, Event)> {
        let received = self.gpu.clock().received();
        Ok((received.unwrap_or(from), self.record_event()?))
    }

    /// Notes that another device ran an operation: the next operation on this GPU does not start at the end of the previous one.
    pub(crate) fn others_ran(&mut self) {
        self.gpu.end_operation();
        self.previous_end = None;
    }

    /// Notes that the next operation is not timed: a later one does not start at the end of the previous one.
    pub(crate) fn runs_untimed(&mut self) {
        self.previous_end = None;
    }

    /// Notes that a wait of the CPU for the compute stream has returned.
    pub(crate) fn waited(&mut self) {
        self.gpu.clock_mut().waited();
        self.previous_end = None;
    }

    /// CPU time of an event of the pass that ended last.
    ///
    /// # Errors
    /// [`Error::PassNotEnded`].
    pub(crate) fn time(&self, event: Event) -> Result<Instant> {
        self.gpu.clock().time(event)
    }
}

/// A copy of `stack` in pinned memory, made at its first use. `None` if pinned memory cannot be allocated.
fn pinned_copy<'p>(
    gpu: &Gpu,
    pinned: &'p mut HashMap<u32, Option<Pinned>>,
    stack: &Matrix,
) -> Option<&'p [u8]> {
    let copy = pinned.entry(stack.place.tensor_idx).or_insert_with(|| {
        let mut copy = gpu.pinned(stack.tensor().len()).ok()?;
        // SAFETY: the memory has just been allocated, so no copy is in flight.
        unsafe { copy.write(stack.tensor()) };
        Some(copy)
    });
    // SAFETY: after the write above, copies only read the memory.
    copy.as_ref().map(|copy| unsafe { copy.bytes() })
}
