//! The devices of a session: the CPU and a list of GPUs.

use std::rc::Rc;
use std::time::Instant;

use moe_gguf::{Gguf, LayerId};
use moe_trace::manifest;

use crate::cuda::post_fetch::{Sample, Settings};
use crate::cuda::{Device, Download, Event, Gpu, Policy, Registered, Result};
use crate::device_id::DeviceId;
use crate::placement::Placement;
use crate::weights::Matrix;

/// A time read from the CPU's clock, or an event of a GPU.
#[derive(Clone, Copy)]
pub(crate) enum TimePoint {
    /// On the CPU's clock.
    Cpu(Instant),
    /// An event of the current pass.
    Gpu(DeviceId, Event),
}

/// Maximum number of GPUs in a list.
pub const MAX_GPUS: usize = 16;

/// The devices of a session: the CPU and a list of GPUs, which may be empty. Each GPU of the list has its own stream,
/// memory limit, weights, scratch memory and clock, even if the same physical GPU is listed more than once.
#[derive(Default)]
pub struct Devices<'g> {
    gpus: Vec<Device>,
    placement: Rc<Placement>,
    /// How experts in CPU memory are computed.
    policy: Policy,
    /// Whether repeated passes use CUDA graphs.
    uses_graphs: bool,
    /// Minimum number of rows of a product for which a matrix in CPU memory is copied to a GPU.
    min_batch: Option<usize>,
    /// Model files whose mapped memory is registered with the driver, so that GPUs read it by DMA.
    registered: Vec<Registered<'g>>,
}

impl<'g> Devices<'g> {
    /// Only the CPU, without GPUs.
    pub fn cpu() -> Devices<'g> {
        Devices::default()
    }

    /// The CPU and `gpus`, with the tensors where `placement` puts them. For products of at least `min_batch` rows,
    /// matrices in CPU memory are copied to a GPU (llama.cpp's `GGML_OP_OFFLOAD_MIN_BATCH`, 32 by default there).
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
            uses_graphs: true,
            min_batch,
            registered: Vec::new(),
        }
    }

    /// Enables [`Policy::PostFetch`]: the down matrices of the selected experts are copied to a GPU while the CPU computes
    /// gate and up.
    ///
    /// # Errors
    /// The driver cannot create a stream.
    pub fn with_post_fetch(mut self, settings: Settings) -> Result<Devices<'g>> {
        self.policy = Policy::PostFetch;
        for gpu in &mut self.gpus {
            gpu.enable_post_fetch(settings)?;
        }
        Ok(self)
    }

    /// Registers the mapped model files with the driver, so that GPUs read them by DMA. Returns whether the driver
    /// supports it. Without it, H2D copies of weights reach a fraction of the PCIe bandwidth.
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

    /// The GPUs, mutable.
    pub fn gpus_mut(&mut self) -> &mut [Device] {
        &mut self.gpus
    }

    /// The device of each tensor and layer.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// How experts in CPU memory are computed.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Descriptions of the GPUs for the manifest.
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

    /// Like [`Devices::gpu`], mutable.
    pub(crate) fn gpu_mut(&mut self, device: DeviceId) -> Option<&mut Device> {
        match device {
            DeviceId::Cpu => None,
            DeviceId::Gpu(index) => self.gpus.get_mut(index),
        }
    }

    /// The device that computes a layer.
    pub(crate) fn layer(&self, layer: LayerId) -> DeviceId {
        self.placement.layer(layer)
    }

    /// The device that computes the output.
    pub(crate) fn output(&self) -> DeviceId {
        self.placement.output()
    }

    /// The device of a matrix according to the placement.
    pub(crate) fn placed(&self, matrix: &Matrix) -> DeviceId {
        self.placement.tensor(&matrix.place)
    }

    /// The GPU that holds a matrix; `None` if the matrix is on the CPU or the GPU has no memory for it.
    pub(crate) fn holder(&mut self, matrix: &Matrix) -> Option<DeviceId> {
        let hot = self.gpus.iter().find(|gpu| gpu.has_all_hot(matrix));
        if let Some(gpu) = hot {
            return Some(gpu.id());
        }
        let device = self.placement.tensor(&matrix.place);
        let holds = self.gpu_mut(device)?.holds(matrix);
        holds.then_some(device)
    }

    /// The GPU to which a matrix in CPU memory is copied for a product: the GPU of its layer, or the first.
    pub(crate) fn nearest_gpu(&self, matrix: &Matrix) -> Option<DeviceId> {
        let layer = self.placement.layer_of(&matrix.place);
        let near = self.gpu(layer).or(self.gpus.first())?;
        Some(near.id())
    }

    /// Whether a matrix in CPU memory is copied to a GPU for a product of `rows` rows.
    pub(crate) fn copies_for(&self, matrix: &Matrix, rows: usize) -> bool {
        self.min_batch.is_some_and(|min| rows >= min)
            && !self.gpus.is_empty()
            && Device::supports(matrix.ty)
    }

    /// Notes that `device` ran an operation. The next operation of another GPU then does not start at the end of that
    /// GPU's previous operation, and needs an event of its own for its start.
    pub(crate) fn ran(&mut self, device: DeviceId) {
        let others = self.gpus.iter_mut().filter(|gpu| gpu.id() != device);
        others.for_each(Device::others_ran);
    }

    /// Ends the operations that were launched last on other devices than `device`, which runs an operation now. The CPU also calls
    /// it before it waits.
    pub(crate) fn end_operations_before(&self, device: DeviceId) {
        let others = self.gpus.iter().filter(|gpu| gpu.id() != device);
        others.for_each(|gpu| gpu.gpu().end_operation());
    }

    /// Notes that the CPU has waited for a GPU.
    pub(crate) fn waited(&mut self, device: DeviceId) {
        if let Some(gpu) = self.gpu_mut(device) {
            gpu.waited();
        }
        self.ran(device);
    }

    /// Orders later work of a GPU after all work launched on the other GPUs so far.
    ///
    /// # Errors
    /// The driver reports an error.
    pub(crate) fn join(&mut self, gpu: DeviceId) -> Result<()> {
        let Some(gpu) = self.gpu(gpu) else {
            return Ok(());
        };
        let others = self.gpus.iter().filter(|other| other.id() != gpu.id());
        others
            .map(Device::gpu)
            .try_for_each(|other| gpu.gpu().follow(other))
    }

    /// Starts the Post-Fetch transfers that are queued.
    pub(crate) fn start_transfers(&mut self) {
        self.gpus.iter_mut().for_each(Device::start_transfers);
    }

    /// Starts a forward pass of `n_tokens` tokens. The compute streams must be idle. `is_plain`: the CPU computes no experts next
    /// to the GPUs.
    ///
    /// # Errors
    /// A GPU reports an error.
    pub(crate) fn begin_pass(&mut self, n_tokens: usize, is_plain: bool) -> Result<()> {
        let repeats = self.uses_graphs && is_plain && !self.placement.uses_cpu();
        let mut gpus = self.gpus.iter_mut();
        gpus.try_for_each(|gpu| gpu.begin_pass(n_tokens, repeats))
    }

    /// Whether kernels of passes that repeat earlier ones are started as CUDA graphs, if the model is on GPUs only. They are by
    /// default; the results are the same.
    pub fn use_graphs(&mut self, yes: bool) {
        self.uses_graphs = yes;
    }

    /// Starts the copies of everything that is recorded of the pass so far, before a wait that covers them, too.
    pub(crate) fn copy_recorded(&mut self) {
        for gpu in &mut self.gpus {
            // The end of the pass repeats it after an error.
            let _ = gpu.copy_recorded();
        }
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

    /// The time of a GPU event of the last pass, on the CPU's clock.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn time(&self, gpu: DeviceId, event: Event) -> Result<Instant> {
        match self.gpu(gpu) {
            Some(gpu) => gpu.time(event),
            None => Ok(Instant::now()),
        }
    }

    /// A time of the last pass, on the CPU's clock.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn at(&self, point: TimePoint) -> Result<Instant> {
        match point {
            TimePoint::Cpu(at) => Ok(at),
            TimePoint::Gpu(gpu, event) => self.time(gpu, event),
        }
    }

    /// Ids and weights of selected experts that were copied from a GPU in the last pass.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(crate) fn downloaded(&self, download: &Download) -> Result<(&[i32], &[f32])> {
        match self.gpus.get(download.gpu()) {
            Some(gpu) => gpu.downloaded(download),
            None => Ok((&[], &[])),
        }
    }

    /// The Post-Fetch transfers of the last pass, ordered by the start of their window.
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
        // Copies from the files must have ended on all GPUs before the files are unregistered.
        for gpu in &self.gpus {
            let _ = gpu.gpu().synchronize();
        }
    }
}
