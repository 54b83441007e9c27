//! The begin and the end of a pass, values that the host waits for, and where a product is computed.

use crate::activation::Activation;
use crate::cuda::{self, Wanted};
use crate::error::Result;
use crate::mirrored::{Mirrored, Plain};
use crate::ops::Ops;
use crate::placement::DeviceId;
use crate::recorder::Routing;
use crate::weights::Matrix;

impl Ops<'_> {
    /// Fetches values that the host is about to read.
    pub(super) fn fetch<T: Plain>(&mut self, values: &mut Mirrored<T>) {
        let home = values.home();
        if home == DeviceId::Cpu {
            return;
        }
        if let Err(error) = values.fetch() {
            self.fault.get_or_insert(error);
            // What it holds now is not what was computed; the pass ends with the error.
            values.host_mut();
        }
        self.waited(home);
    }

    /// Fetches what the host is about to compute experts with, with one wait: rows, the choice, and its weights if the host
    /// weighs the experts, too.
    pub(super) fn fetch_chosen(&mut self, x: &mut Activation, routing: &mut Routing, weighs: bool) {
        let home = match x.values.home() {
            DeviceId::Cpu => routing.ids.home(),
            gpu => gpu,
        };
        let mut wanted: Vec<Wanted> = Vec::new();
        wanted.extend(x.values.wanted(home));
        wanted.extend(routing.ids.wanted(home));
        if weighs {
            wanted.extend(routing.weights.wanted(home));
        }
        if let Some(gpu) = self.devices.gpu_mut(home)
            && wanted.len() > 1
            && gpu.fetch_together(&mut wanted).is_ok()
        {
            x.values.fetched(home);
            routing.ids.fetched(home);
            if weighs {
                routing.weights.fetched(home);
            }
            self.waited(home);
        }
        // What did not come so comes by itself.
        self.fetch(&mut x.values);
        self.fetch(&mut routing.ids);
    }

    /// The host has waited for a GPU.
    pub(crate) fn waited(&mut self, gpu: DeviceId) {
        self.devices.waited(gpu);
        self.recorder.host_is_free();
    }

    /// Waits for all that was launched on GPUs.
    ///
    /// # Errors
    /// Some of it failed.
    pub(crate) fn wait_for_gpus(&mut self) -> cuda::Result<()> {
        for index in 0..self.devices.gpus().len() {
            self.devices.gpus()[index].gpu().synchronize()?;
            self.waited(DeviceId::Gpu(index));
        }
        Ok(())
    }

    /// Fetches rows that the session is about to read.
    pub fn fetch_rows(&mut self, x: &mut Activation) {
        self.fetch(&mut x.values);
    }

    /// Begins a pass.
    ///
    /// # Errors
    /// A GPU cannot begin one.
    pub fn begin_pass(&mut self) -> Result<()> {
        self.first_position = self.positions.first().copied().unwrap_or(0);
        Ok(self.devices.begin_pass()?)
    }

    /// Ends a pass: waits for the GPUs, and hands on what was recorded.
    ///
    /// # Errors
    /// A GPU lost values in this pass, or a record could not be written.
    pub fn end_pass(&mut self) -> Result<()> {
        self.devices.end_pass()?;
        if let Some(fault) = self.fault.take() {
            return Err(fault.into());
        }
        let samples = self.devices.samples()?;
        self.recorder.transfers(&samples, self.first_position)?;
        self.recorder.end(&self.devices)
    }

    /// The device that computes a product of `rows` rows with a matrix: the one where the matrix lives, or a GPU from so many
    /// rows on that copying it there is worth while.
    pub(super) fn device_of(&mut self, weights: &Matrix, rows: usize) -> DeviceId {
        if let Some(gpu) = self.devices.holder(weights) {
            return gpu;
        }
        let copied = self.devices.copies_for(weights, rows);
        let gpu = self.devices.nearest_gpu(weights).filter(|_| copied);
        gpu.unwrap_or(DeviceId::Cpu)
    }
}
