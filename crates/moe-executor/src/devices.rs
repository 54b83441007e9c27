//! The devices of a session: the CPU, and GPUs in the order of a list.

use std::rc::Rc;
use std::time::Instant;

use moe_gguf::Gguf;
use moe_trace::manifest;

use crate::cuda::post_fetch::{Sample, Settings};
use crate::cuda::{Device, Download, Event, Gpu, Policy, Registered, Result};
use crate::placement::{DeviceId, Placement};
use crate::weights::Matrix;

/// GPUs that a list may have.
pub const MAX_GPUS: usize = 16;

/// The devices of a session: the CPU, which always takes part, and the GPUs of a list. Each GPU has its own stream, memory
/// limit, weights, scratch and clock, also if the same physical GPU is listed more than once.
#[derive(Default)]
pub struct Devices<'g> {
    gpus: Vec<Device>,
    placement: Rc<Placement>,
    /// What becomes of experts that live with the CPU.
    policy: Policy,
    /// Rows of a product from which a matrix of the CPU is copied to a GPU for it.
    min_batch: Option<usize>,
    /// Files whose memory the GPUs read by themselves.
    registered: Vec<Registered<'g>>,
}

impl<'g> Devices<'g> {
    /// The CPU alone.
    pub fn cpu() -> Devices<'g> {
        Devices::default()
    }

    /// The CPU, and GPUs on which the tensors live that `placement` puts there. For products of `min_batch` rows or more the
    /// others are copied to a GPU, too (llama.cpp's `GGML_OP_OFFLOAD_MIN_BATCH`, 32 there).
    pub fn new(
        gpus: Vec<Gpu>,
        placement: Placement,
        policy: Policy,
        min_batch: Option<usize>,
    ) -> Devices<'g> {
        let placement = Rc::new(placement);
        let gpus = gpus.into_iter();
        Devices {
            gpus: gpus
                .map(|gpu| Device::new(gpu, placement.clone()))
                .collect(),
            placement,
            policy,
            min_batch,
            registered: Vec::new(),
        }
    }

    /// Has the down matrices of chosen experts travel while the CPU computes the others, with [`Policy::PostFetch`].
    ///
    /// # Errors
    /// The driver has no stream left.
    pub fn with_post_fetch(mut self, settings: Settings) -> Result<Devices<'g>> {
        self.policy = Policy::PostFetch;
        for gpu in &mut self.gpus {
            gpu.enable_post_fetch(settings)?;
        }
        Ok(self)
    }

    /// Has the GPUs read the model's mapped files by themselves. Returns whether the driver allows it; without, copies of weights
    /// run at a fraction of the speed of PCIe.
    pub fn register(&mut self, gguf: &'g Gguf) -> bool {
        let Some(gpu) = self.gpus.first() else {
            return false;
        };
        if self.registered.is_empty() {
            let files = gguf.files().iter();
            let registered: Result<Vec<_>> = files
                .map(|file| gpu.gpu().register(file.contents()))
                .collect();
            self.registered = registered.unwrap_or_default();
        }
        let registered = !self.registered.is_empty();
        if registered {
            self.gpus.iter_mut().for_each(Device::files_are_registered);
        }
        registered
    }

    /// The GPUs.
    pub fn gpus(&self) -> &[Device] {
        &self.gpus
    }

    /// The GPUs, to configure.
    pub fn gpus_mut(&mut self) -> &mut [Device] {
        &mut self.gpus
    }

    /// What becomes of experts that live with the CPU.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// The GPUs as the manifest describes them.
    pub fn describe(&self) -> Vec<manifest::Gpu> {
        let gpus = self.gpus.iter();
        gpus.map(|gpu| gpu.describe(self.min_batch)).collect()
    }

    /// A GPU of the list; `None` for the CPU.
    pub(crate) fn gpu(&self, device: DeviceId) -> Option<&Device> {
        match device {
            DeviceId::Cpu => None,
            DeviceId::Gpu(index) => self.gpus.get(index),
        }
    }

    /// As [`Devices::gpu`].
    pub(crate) fn gpu_mut(&mut self, device: DeviceId) -> Option<&mut Device> {
        match device {
            DeviceId::Cpu => None,
            DeviceId::Gpu(index) => self.gpus.get_mut(index),
        }
    }

    /// The device that computes layer `il`; the number of layers stands for the output.
    pub(crate) fn layer(&self, il: usize) -> DeviceId {
        self.placement.layer(il)
    }

    /// The GPU on which a matrix lives, if one has room for it.
    pub(crate) fn holder(&mut self, matrix: &Matrix) -> Option<DeviceId> {
        let device = self.placement.tensor(&matrix.place);
        let holds = self.gpu_mut(device)?.holds(matrix);
        holds.then_some(device)
    }

    /// The GPU to which a matrix of the CPU is copied for a product: that of its layer, or the first one.
    pub(crate) fn nearest_gpu(&self, matrix: &Matrix) -> Option<DeviceId> {
        let layer = self.placement.layer_of(&matrix.place);
        let near = self.gpu(layer).or(self.gpus.first())?;
        Some(near.id())
    }

    /// Whether a matrix of the CPU is copied to a GPU for a product of `rows` rows.
    pub(crate) fn copies_for(&self, matrix: &Matrix, rows: usize) -> bool {
        self.min_batch.is_some_and(|min| rows >= min)
            && !self.gpus.is_empty()
            && Device::supports(matrix.ty)
    }

    /// `device` ran an operation: what another GPU gets next does not start at the end of what it got last.
    pub(crate) fn ran(&mut self, device: DeviceId) {
        let others = self.gpus.iter_mut().filter(|gpu| gpu.id() != device);
        others.for_each(Device::others_ran);
    }

    /// The CPU has waited for a GPU.
    pub(crate) fn waited(&mut self, device: DeviceId) {
        if let Some(gpu) = self.gpu_mut(device) {
            gpu.waited();
        }
        self.ran(device);
    }

    /// Has what a GPU is given next start after all that the others were given so far.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn join(&mut self, gpu: DeviceId) -> Result<()> {
        let Some(gpu) = self.gpu(gpu) else {
            return Ok(());
        };
        let others = self.gpus.iter().filter(|other| other.id() != gpu.id());
        others
            .map(Device::gpu)
            .try_for_each(|other| gpu.gpu().follow(other))
    }

    /// Starts the transfers of Post-Fetch that have not been started.
    pub(crate) fn start_transfers(&mut self) {
        self.gpus.iter_mut().for_each(Device::start_transfers);
    }

    /// Begins a pass; nothing is under way on the streams that compute.
    ///
    /// # Errors
    /// A GPU's.
    pub(crate) fn begin_pass(&mut self) -> Result<()> {
        self.gpus.iter_mut().try_for_each(Device::begin_pass)
    }

    /// Ends a pass: waits for all work on all GPUs, and finds the times of the events of the pass.
    ///
    /// # Errors
    /// That of the first GPU that failed; the work of the others has ended, too.
    pub(crate) fn end_pass(&mut self) -> Result<()> {
        let ended: Vec<Result<()>> = self.gpus.iter_mut().map(Device::end_pass).collect();
        ended.into_iter().collect::<Result<()>>()?;
        Device::find_times(&self.gpus);
        Ok(())
    }

    /// When an event of the pass that ended last was on a GPU, on the host's clock.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn time(&self, gpu: DeviceId, event: Event) -> Result<Instant> {
        match self.gpu(gpu) {
            Some(gpu) => gpu.time(event),
            None => Ok(Instant::now()),
        }
    }

    /// Experts and weights that were copied from a GPU in the pass that has ended.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn downloaded(&self, download: &Download) -> Result<(&[i32], &[f32])> {
        match self.gpus.get(download.gpu()) {
            Some(gpu) => gpu.downloaded(download),
            None => Ok((&[], &[])),
        }
    }

    /// What the layers of this pass transferred, in their order, once the pass is over.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn samples(&mut self) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for gpu in &mut self.gpus {
            samples.extend(gpu.samples()?);
        }
        samples.sort_by_key(|sample| sample.window);
        Ok(samples)
    }
}

impl Drop for Devices<'_> {
    fn drop(&mut self) {
        // Before the files are unregistered, copies from them must have ended on every GPU.
        for gpu in &self.gpus {
            let _ = gpu.gpu().synchronize();
        }
    }
}
