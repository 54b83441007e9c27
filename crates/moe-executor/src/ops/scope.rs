//! An operation from its start to its record: where it runs, and when it ran.

use std::time::Instant;

use crate::activation::NodeName;
use crate::cuda::{self, Device, Event};
use crate::ops::Ops;
use crate::placement::DeviceId;
use crate::recorder::{Lanes, RoutedRows, Routing, Source, When};

/// An operation from its start to its record. [`Ops::on`] runs it on a GPU; otherwise the host computes it. Once it is recorded, it
/// stands for the next operation: that has already been computed if one kernel does the work of both.
pub(super) struct Scope {
    /// When it started if the host computes it.
    start: Instant,
    ran: Ran,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ran {
    /// On the host.
    Host,
    /// On a GPU, between two events if it is recorded.
    Gpu(DeviceId, Option<(Event, Event)>),
    /// On a GPU, in the kernel of an operation before it.
    Within,
}

impl Scope {
    fn on_host(start: Instant) -> Scope {
        Scope {
            start,
            ran: Ran::Host,
        }
    }

    /// Whether a GPU has computed it.
    pub fn is_done(&self) -> bool {
        self.ran != Ran::Host
    }

    /// The same operation computed by the host: the GPU had nothing to do for it.
    pub fn left_to_host(self) -> Scope {
        Scope::on_host(self.start)
    }
}

impl Ops<'_> {
    /// Starts an operation.
    pub(super) fn start(&self) -> Scope {
        Scope::on_host(self.recorder.start())
    }

    /// Starts an expert operation.
    pub(super) fn start_experts(&self) -> Scope {
        Scope::on_host(self.recorder.start_experts())
    }

    /// Runs `launch` if the operation belongs on a GPU. Returns whether that did it; if not, the host computes the operation.
    pub(super) fn on(
        &mut self,
        scope: &mut Scope,
        device: DeviceId,
        launch: impl FnOnce(&mut Device) -> cuda::Result<()>,
    ) -> bool {
        let Some(gpu) = self.devices.gpu_mut(device) else {
            return false;
        };
        let timed = self.recorder.is_on();
        let run = || {
            let from = timed.then(|| gpu.start_event()).transpose()?;
            launch(gpu)?;
            from.map(|from| gpu.end_events(from)).transpose()
        };
        let ran = run();
        // The host goes on while the GPU computes.
        self.recorder.host_is_free();
        match ran {
            Ok(events) => {
                self.devices.ran(device);
                scope.ran = Ran::Gpu(device, events);
                true
            }
            Err(error) => {
                gpu.fallbacks.ops += 1;
                gpu.fallbacks.note(&error);
                self.recorder.fell_back();
                false
            }
        }
    }

    /// Records an operation under the name of its result.
    pub(super) fn record(&mut self, scope: &mut Scope, op: u8, dst: NodeName, sources: &[Source]) {
        let first = self.positions.first().copied().unwrap_or(0);
        let when = self.when(scope);
        self.recorder
            .op(when, op, dst, sources, first, self.positions.len());
        scope.start = self.recorder.start();
    }

    /// Records an expert operation: where each expert of `routing` was computed is in `lanes`.
    pub(super) fn record_experts(
        &mut self,
        scope: &mut Scope,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        (routing, lanes): (&Routing, Lanes),
    ) {
        let when = self.when(scope);
        let choice = RoutedRows {
            positions: &self.positions,
            routing,
            lanes,
        };
        self.recorder.experts(when, op, dst, sources, &choice);
        scope.start = self.recorder.start_experts();
    }

    fn when(&mut self, scope: &mut Scope) -> When {
        match scope.ran {
            Ran::Host => {
                self.devices.ran(DeviceId::Cpu);
                When::Host(scope.start)
            }
            Ran::Gpu(device, events) => {
                scope.ran = Ran::Within;
                events.map_or(When::Within, |(from, to)| When::Gpu(device, from, to))
            }
            Ran::Within => When::Within,
        }
    }
}
