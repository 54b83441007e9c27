//! The GPU as a session uses it: what lies there, what is computed there, and when.

mod scratch;
mod weights;

use std::collections::HashMap;
use std::time::Instant;

use cudarc::driver::CudaStream;
use moe_gguf::Gguf;

use super::clock::{Clock, Mark};
use super::download::{Download, Downloads};
use super::fetch::{Staging, Wanted};
use super::launch::Kernels;
use super::post_fetch::{self, PostFetch, Sample, Settings};
use super::{DeviceBuffer, Error, Gpu, Pinned, Registered, Result};
use crate::placement::Placement;
use crate::recorder::Routing;
use crate::weights::Matrix;

pub use scratch::Scratch;
use weights::Resident;

/// The GPU as a session uses it. Weights are copied to it when they are first asked for.
pub struct Device<'g> {
    pub(crate) gpu: Gpu,
    placement: Placement,
    /// By index in the GGUF's tensor table; none where there was no room.
    matrices: HashMap<u32, Option<Resident>>,
    vectors: HashMap<u32, DeviceBuffer>,
    scratch: [Option<DeviceBuffer>; Scratch::ALL],
    positions: Vec<u32>,
    clock: Clock,
    /// Whether the host did something since the last moment.
    host_took_over: bool,
    downloads: Downloads,
    staging: Staging,
    /// What becomes of experts that live with the host.
    policy: Policy,
    /// Transfers beside the host's work, with the policy that has them.
    pub(crate) post_fetch: Option<PostFetch>,
    /// Whether a transfer of the layer that is under way could not be started.
    transfers_failed: bool,
    /// Stacks whose file could not be registered, copied to memory that the GPU reads by itself.
    pinned: HashMap<u32, Option<Pinned>>,
    /// Rows of a product from which a matrix of the host is copied to the GPU for it.
    min_batch: Option<usize>,
    /// Files whose memory the GPU reads by itself. Dropped before the files, which outlive `'g`.
    registered: Vec<Registered>,
    mapped: std::marker::PhantomData<&'g Gguf>,
    /// What went wrong and was done by the host.
    pub fallbacks: Fallbacks,
}

/// What went wrong on the GPU and was done by the host.
#[derive(Debug, Default, Clone)]
pub struct Fallbacks {
    /// Operations.
    pub ops: u64,
    /// Tensors that found no room.
    pub tensors: Vec<String>,
    /// The first error.
    pub first: Option<String>,
}

/// What becomes of the chosen experts whose weights live with the host, when there are few rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// The host computes them.
    #[default]
    Cpu,
    /// They are copied to the GPU when they are chosen, and computed there.
    Gpu,
    /// The host computes gate and up while down is copied to the GPU.
    PostFetch,
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
            clock: Clock::default(),
            host_took_over: false,
            policy,
            post_fetch: None,
            transfers_failed: false,
            pinned: HashMap::new(),
            min_batch,
            downloads: Downloads::default(),
            staging: Staging::default(),
            registered: Vec::new(),
            mapped: std::marker::PhantomData,
            fallbacks: Fallbacks::default(),
        }
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The kernels.
    pub fn kernels(&self) -> &Kernels {
        self.gpu.kernels()
    }

    /// The stream that computes.
    pub fn stream(&self) -> &CudaStream {
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
    /// The GPU's work failed.
    pub fn samples(&mut self) -> Result<Vec<Sample>> {
        let post_fetch = self.post_fetch.as_mut();
        let samples = post_fetch.map_or(Ok(Vec::new()), PostFetch::samples);
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
        let pinned = match registered || self.post_fetch.is_none() {
            true => None,
            false => pinned_copy(&self.gpu, &mut self.pinned, stack),
        };
        let Some(post_fetch) = &mut self.post_fetch else {
            return false;
        };
        let size = stack.row_size * stack.n_out;
        let bytes_of = |expert: i32| match pinned {
            Some(copy) => &copy[expert as usize * size..][..size],
            None => stack.rows(expert as usize, 0..stack.n_out),
        };
        // SAFETY: a session borrows its model, whose mapped files outlive it; pinned copies are kept, and dropped after
        // `post_fetch`.
        unsafe { post_fetch.begin(&self.gpu, il, ids, tokens, size, bytes_of) };
        self.note_transfers();
        true
    }

    /// Starts the transfers of this layer that have not been started, if there are any.
    pub(crate) fn start_transfers(&mut self) {
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.start_waiting();
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
    pub fn begin_download(&mut self, routing: &mut Routing) -> Result<()> {
        let n = routing.ids.len();
        let ids = routing.ids.device(&self.gpu)?;
        let weights = routing.weights.device(&self.gpu)?;
        routing.copy = Some(self.downloads.begin(&self.gpu, ids, weights, n)?);
        Ok(())
    }

    /// Experts and weights that were copied, once the stream has come so far.
    pub fn downloaded(&self, download: &Download) -> (&[i32], &[f32]) {
        self.downloads.get(download)
    }

    /// Begins a pass; nothing is under way on the stream.
    ///
    /// # Errors
    /// An event cannot be made or recorded.
    pub fn begin_pass(&mut self) -> Result<()> {
        self.downloads.clear();
        if let Some(post_fetch) = &mut self.post_fetch {
            post_fetch.begin_pass(&self.gpu)?;
        }
        self.host_took_over = false;
        self.clock.restart(&self.gpu, self.gpu.stream())
    }

    /// A moment of the stream, from here on.
    ///
    /// # Errors
    /// An event cannot be made or recorded.
    pub fn mark(&mut self) -> Result<Mark> {
        let mark = self.clock.mark(&self.gpu, self.gpu.stream())?;
        self.host_took_over = false;
        Ok(mark)
    }

    /// The last moment if the GPU went on from there, or a new one.
    ///
    /// # Errors
    /// As [`Device::mark`].
    pub fn last_mark(&mut self) -> Result<Mark> {
        match self.clock.last() {
            Some(mark) if !self.host_took_over => Ok(mark),
            _ => self.mark(),
        }
    }

    /// The host did something while the GPU waited.
    pub fn host_took_over(&mut self) {
        self.host_took_over = true;
    }

    /// When a moment of this pass was, once the stream has come so far.
    ///
    /// # Errors
    /// The GPU's work failed.
    pub fn time(&self, mark: Mark) -> Result<Instant> {
        self.clock.time(mark)
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
        copy.bytes_mut().copy_from_slice(stack.all());
        Some(copy)
    });
    copy.as_ref().map(Pinned::bytes)
}

impl Fallbacks {
    /// Keeps the first error.
    pub(crate) fn note(&mut self, error: &Error) {
        self.first.get_or_insert_with(|| error.to_string());
    }
}
