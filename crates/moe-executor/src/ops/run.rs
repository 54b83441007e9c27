//! Where an operation runs, and when it ran.

use std::time::Instant;

use crate::activation::{Activation, NodeName};
use crate::cuda::{self, Device, Event, Wanted};
use crate::error::Result;
use crate::mirrored::{Mirrored, Plain};
use crate::ops::Ops;
use crate::placement::Side;
use crate::recorder::{Routing, Source, When};
use crate::weights::Matrix;

/// How the current operation ran.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ran {
    /// On the host.
    Host,
    /// On the GPU, between two events if it is recorded.
    Gpu(Option<(Event, Event)>),
    /// On the GPU, in the kernel of an operation before it.
    Within,
}

impl Ops<'_> {
    /// Time before an operation; pass it to [`Ops::record`].
    pub(super) fn start(&mut self) -> Instant {
        self.ran = Ran::Host;
        self.recorder.start()
    }

    /// Time before an expert operation; pass it to [`Ops::record_experts`].
    pub(super) fn start_experts(&mut self) -> Instant {
        self.ran = Ran::Host;
        self.recorder.start_experts()
    }

    /// Runs `launch` if the operation belongs on the GPU. Gives whether it did; if not, the host does it.
    pub(super) fn on(
        &mut self,
        side: Side,
        launch: impl FnOnce(&mut Device) -> cuda::Result<()>,
    ) -> bool {
        let (Side::Gpu, Some(device)) = (side, &mut self.device) else {
            return false;
        };
        let timed = self.recorder.is_on();
        let run = || {
            let from = timed.then(|| device.start_event()).transpose()?;
            launch(device)?;
            let to = timed.then(|| device.record_event()).transpose()?;
            Ok(from.zip(to))
        };
        let ran = run();
        // The host goes on while the GPU computes.
        self.recorder.host_is_free();
        match ran {
            Ok(events) => {
                self.ran = Ran::Gpu(events);
                true
            }
            Err(error) => {
                device.fallbacks.ops += 1;
                device.fallbacks.note(&error);
                self.recorder.fell_back();
                false
            }
        }
    }

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
        let weights = match weighs {
            true => routing.weights.wanted(),
            false => None,
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
        self.side = Side::Host;
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
        match device.holds(weights) || device.copies_for(weights, rows) {
            true => Side::Gpu,
            false => Side::Host,
        }
    }

    /// The host does what the GPU had nothing to do for.
    pub(super) fn forget_run(&mut self) {
        self.ran = Ran::Host;
    }

    /// Whether an operation before this one has computed it already.
    pub(super) fn is_done(&self) -> bool {
        self.ran != Ran::Host
    }

    pub(super) fn record(&mut self, start: Instant, op: u8, dst: NodeName, sources: &[Source]) {
        let first = self.positions.first().copied().unwrap_or(0);
        let when = self.when(start);
        self.recorder
            .op(when, op, dst, sources, first, self.positions.len());
    }

    /// When the operation ran that started at `start` if it was the host's.
    pub(super) fn when(&mut self, start: Instant) -> When {
        match self.ran {
            Ran::Host => {
                // What the GPU gets next does not start at the end of what it got last.
                if let Some(device) = &mut self.device {
                    device.host_ran();
                }
                When::Host(start)
            }
            Ran::Gpu(events) => {
                self.ran = Ran::Within;
                events.map_or(When::Within, |(from, to)| When::Gpu(from, to))
            }
            Ran::Within => When::Within,
        }
    }
}
