//! Start and end of a forward pass, D2H copies that the CPU waits for, and the device of a product.

use moe_trace::TokenId;

use crate::activation::Activation;
use crate::cuda::{self, Wanted};
use crate::device_id::DeviceId;
use crate::error::Result;
use crate::mirrored::{Mirrored, Plain};
use crate::ops::Ops;
use crate::recorder::Routing;
use crate::weights::Matrix;

impl Ops<'_> {
    /// Copies values to the CPU before it reads them.
    pub(super) fn fetch<T: Plain>(&mut self, values: &mut Mirrored<T>) {
        let home = values.home();
        if home == DeviceId::Cpu {
            return;
        }
        self.before_wait();
        if let Err(error) = values.fetch() {
            self.fault.get_or_insert(error);
            // The values in CPU memory are stale; the pass ends with the error.
            values.host_mut();
        }
        self.waited(home);
    }

    /// Copies the inputs of expert operations to the CPU, with one wait: activations and expert ids, and the expert weights
    /// if the CPU also computes the weighted sum (`with_weights`).
    pub(super) fn fetch_expert_inputs(
        &mut self,
        x: &mut Activation,
        routing: &mut Routing,
        with_weights: bool,
    ) {
        self.before_wait();
        let home = match x.values.home() {
            DeviceId::Cpu => routing.ids.home(),
            gpu => gpu,
        };
        let mut wanted: Vec<Wanted> = Vec::new();
        wanted.extend(x.values.wanted(home));
        wanted.extend(routing.ids.wanted(home));
        if with_weights {
            wanted.extend(routing.weights.wanted(home));
        }
        if let Some(gpu) = self.devices.gpu_mut(home)
            && wanted.len() > 1
            && gpu.fetch_together(&mut wanted).is_ok()
        {
            x.values.fetched(home);
            routing.ids.fetched(home);
            if with_weights {
                routing.weights.fetched(home);
            }
            self.waited(home);
        }
        // Fetch individually what the batched copy did not cover.
        self.fetch(&mut x.values);
        self.fetch(&mut routing.ids);
    }

    /// Copies two activations to the CPU, with one wait.
    pub(super) fn fetch_both(&mut self, a: &mut Activation, b: &mut Activation) {
        self.before_wait();
        let home = a.values.home();
        let wanted = [a.values.wanted(home), b.values.wanted(home)];
        let mut wanted: Vec<Wanted> = wanted.into_iter().flatten().collect();
        if let Some(gpu) = self.devices.gpu_mut(home)
            && wanted.len() > 1
            && gpu.fetch_together(&mut wanted).is_ok()
        {
            a.values.fetched(home);
            b.values.fetched(home);
            self.waited(home);
        }
        self.fetch(&mut a.values);
        self.fetch(&mut b.values);
    }

    /// Answers searches for slots, for which a GPU may wait, and ends the operations that were launched last.
    fn before_wait(&mut self) {
        self.serve_slots();
        self.devices.end_operations_before(DeviceId::Cpu);
    }

    /// Notes that the CPU has waited for a GPU.
    pub(crate) fn waited(&mut self, gpu: DeviceId) {
        self.devices.waited(gpu);
        self.recorder.host_is_free();
    }

    /// Waits for all work launched on GPUs.
    ///
    /// # Errors
    /// Some of the work failed.
    pub(crate) fn wait_for_gpus(&mut self) -> cuda::Result<()> {
        self.serve_slots();
        for index in 0..self.devices.gpus().len() {
            self.devices.gpus()[index].gpu().synchronize()?;
            self.waited(DeviceId::Gpu(index));
        }
        Ok(())
    }

    /// Copies the results of a pass to the CPU before the session reads them, with everything that is recorded of the pass.
    pub fn fetch_rows(&mut self, x: &mut Activation) {
        self.devices.copy_recorded();
        self.fetch(&mut x.values);
    }

    /// Starts a forward pass.
    ///
    /// # Errors
    /// A GPU reports an error.
    pub fn begin_pass(&mut self) -> Result<()> {
        self.batch_observer.begin_pass();
        self.first_position = TokenId(self.positions.first().copied().unwrap_or(0));
        if let Some(cache) = &mut self.hot {
            cache.begin_pass(self.positions.len());
        }
        let is_plain = self.hot.is_none() && self.dynamic.is_none();
        let begun = self.devices.begin_pass(self.positions.len(), is_plain);
        Ok(begun?)
    }

    /// Ends a forward pass: waits for the GPUs and writes the records.
    ///
    /// # Errors
    /// Values on a GPU were lost in this pass, or a record cannot be written.
    pub fn end_pass(&mut self) -> Result<()> {
        self.serve_slots();
        self.devices.end_pass()?;
        if let Some(fault) = self.fault.take() {
            return Err(fault.into());
        }
        if let Some(cache) = &mut self.hot {
            cache.end_pass(&self.devices)?;
        }
        self.record_slot_lanes();
        self.report_routing()?;
        let samples = self.devices.samples()?;
        self.recorder.transfers(&samples, self.first_position)?;
        self.recorder.end(&self.devices)
    }

    /// Lets the next kernel start after those so far. Kernels for experts read a quantized row before the previous kernel ends, which must
    /// not be the one that computes `x`.
    pub(crate) fn wait_for_input(&mut self, x: &Activation) {
        if let Some(gpu) = self.devices.gpu_mut(x.values.home()) {
            gpu.follow_launches();
        }
    }

    /// The device that computes a product of `rows` rows with a matrix: the GPU that holds it, a GPU that gets a copy of it
    /// if `rows` reaches the offload threshold, or the CPU.
    pub(super) fn device_of(&mut self, weights: &Matrix, rows: usize) -> DeviceId {
        if let Some(gpu) = self.devices.holder(weights) {
            return gpu;
        }
        let copied = self.devices.copies_for(weights, rows);
        let gpu = self.devices.nearest_gpu(weights).filter(|_| copied);
        gpu.unwrap_or(DeviceId::Cpu)
    }
}
