//! The begin and the end of a pass, values that the host waits for, and where a product is computed.

use crate::activation::Activation;
use crate::cuda::Wanted;
use crate::error::Result;
use crate::mirrored::{Mirrored, Plain};
use crate::ops::Ops;
use crate::placement::Side;
use crate::recorder::Routing;
use crate::weights::Matrix;

impl Ops<'_> {
    /// Fetches values that the host is about to read.
    pub(super) fn fetch<T: Plain>(&mut self, values: &mut Mirrored<T>) {
        if !values.is_on_device_alone() {
            return;
        }
        if let Err(error) = values.fetch() {
            self.fault.get_or_insert(error);
            // What it holds now is not what was computed; the pass ends with the error.
            values.host_mut();
        }
        self.waited();
    }

    /// Fetches what the host is about to compute experts with, with one wait: rows, the choice, and its weights if the host
    /// weighs the experts, too.
    pub(super) fn fetch_chosen(&mut self, x: &mut Activation, routing: &mut Routing, weighs: bool) {
        let weights = if weighs {
            routing.weights.wanted()
        } else {
            None
        };
        let wanted = [x.values.wanted(), routing.ids.wanted(), weights];
        let mut wanted: Vec<Wanted> = wanted.into_iter().flatten().collect();
        if let Some(device) = &mut self.device
            && wanted.len() > 1
            && device.fetch_together(&mut wanted).is_ok()
        {
            x.values.fetched();
            routing.ids.fetched();
            if weighs {
                routing.weights.fetched();
            }
            self.waited();
        }
        // What did not come so comes by itself.
        self.fetch(&mut x.values);
        self.fetch(&mut routing.ids);
    }

    /// The host has waited for the GPU.
    pub(crate) fn waited(&mut self) {
        if let Some(device) = &mut self.device {
            device.waited();
        }
        self.recorder.host_is_free();
    }

    /// Fetches rows that the session is about to read.
    pub fn fetch_rows(&mut self, x: &mut Activation) {
        self.fetch(&mut x.values);
    }

    /// Begins a pass.
    ///
    /// # Errors
    /// The GPU cannot begin one.
    pub fn begin_pass(&mut self) -> Result<()> {
        self.first_position = self.positions.first().copied().unwrap_or(0);
        match &mut self.device {
            Some(device) => Ok(device.begin_pass()?),
            None => Ok(()),
        }
    }

    /// Ends a pass: waits for the GPU, and hands on what was recorded.
    ///
    /// # Errors
    /// The GPU lost values in this pass, or a record could not be written.
    pub fn end_pass(&mut self) -> Result<()> {
        if let Some(device) = &mut self.device {
            device.end_pass()?;
        }
        if let Some(fault) = self.fault.take() {
            return Err(fault.into());
        }
        if let Some(device) = &mut self.device {
            let samples = device.samples()?;
            self.recorder.transfers(&samples, self.first_position)?;
        }
        self.recorder.end(self.device.as_ref())
    }

    /// Where a product of `rows` rows with a matrix is computed: where the matrix lives, and on the GPU from so many rows
    /// on that copying it there is worth while.
    pub(super) fn side_of(&mut self, weights: &Matrix, rows: usize) -> Side {
        let Some(device) = &mut self.device else {
            return Side::Host;
        };
        if device.holds(weights) || device.copies_for(weights, rows) {
            Side::Gpu
        } else {
            Side::Host
        }
    }
}
