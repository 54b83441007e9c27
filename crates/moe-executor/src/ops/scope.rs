//! The start, device and time of an operation, from its start to its record.

use std::time::Instant;

use moe_engine::Mode;

use crate::activation::NodeName;
use crate::cuda::{self, Device, Event};
use crate::device_id::DeviceId;
use crate::devices::TimePoint;
use crate::ops::Ops;
use crate::recorder::{Lanes, PassTokens, RoutedRows, Routing, Source, When};

/// An operation from its start to its record. If [`Ops::on`] does not run it on a GPU, the CPU computes it. After its record
/// the scope is that of the next operation, which is done already if the same kernel computed both.
pub(super) struct Scope {
    /// Start of the operation if the CPU computes it.
    start: Instant,
    /// Whether start and end on a GPU are measured.
    is_timed: bool,
    ran: Executor,
}

/// Where an operation ran.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Executor {
    /// On the CPU.
    Cpu,
    /// On a GPU, between two events if it is recorded.
    Gpu(DeviceId, Option<(Event, Event)>),
    /// On a GPU, in the kernel of an earlier operation.
    Fused,
}

impl Scope {
    fn on_cpu(start: Instant, is_timed: bool) -> Scope {
        Scope {
            start,
            is_timed,
            ran: Executor::Cpu,
        }
    }

    /// Whether a GPU has computed the operation.
    pub fn is_done(&self) -> bool {
        self.ran != Executor::Cpu
    }

    /// Start and end of the operation on a GPU, if they are measured.
    pub fn span(&self) -> Option<(TimePoint, TimePoint)> {
        match self.ran {
            Executor::Gpu(gpu, Some((from, to))) => {
                Some((TimePoint::Gpu(gpu, from), TimePoint::Gpu(gpu, to)))
            }
            _ => None,
        }
    }

    /// The same operation computed on the CPU, because the GPU had no part of it to compute.
    pub fn left_to_cpu(self) -> Scope {
        Scope::on_cpu(self.start, self.is_timed)
    }
}

impl Ops<'_> {
    /// Starts an operation.
    pub(super) fn start(&self) -> Scope {
        let is_recorded = self.recorder.is_on() && self.recorder.mode() == Mode::All;
        Scope::on_cpu(self.recorder.start(), is_recorded)
    }

    /// Starts an expert operation.
    pub(super) fn start_experts(&self) -> Scope {
        Scope::on_cpu(self.recorder.start_experts(), self.recorder.is_on())
    }

    /// Runs `launch` if `device` is a GPU. Returns whether the GPU computes the operation; if not, the CPU must.
    pub(super) fn on(
        &mut self,
        scope: &mut Scope,
        device: DeviceId,
        launch: impl FnOnce(&mut Device) -> cuda::Result<()>,
    ) -> bool {
        let is_timed = scope.is_timed;
        if let Some(gpu) = self.devices.gpu_mut(device).filter(|_| !is_timed) {
            gpu.runs_untimed();
        }
        let done = self.try_on(scope, device, is_timed, launch);
        if device != DeviceId::Cpu {
            // The CPU continues while the GPU computes.
            self.recorder.host_is_free();
        }
        done
    }

    /// Like [`Ops::on`], while the CPU computes another operation. `is_timed`: whether start and end are measured.
    pub(super) fn try_on(
        &mut self,
        scope: &mut Scope,
        device: DeviceId,
        is_timed: bool,
        launch: impl FnOnce(&mut Device) -> cuda::Result<()>,
    ) -> bool {
        self.devices.end_operations_before(device);
        let Some(gpu) = self.devices.gpu_mut(device) else {
            return false;
        };
        let run = || {
            let from = is_timed.then(|| gpu.start_event()).transpose()?;
            launch(gpu)?;
            from.map(|from| gpu.end_events(from)).transpose()
        };
        match run() {
            Ok(events) => {
                self.devices.ran(device);
                scope.ran = Executor::Gpu(device, events);
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

    /// Records an operation; `dst` is the name of its result.
    pub(super) fn record(&mut self, scope: &mut Scope, op: u8, dst: NodeName, sources: &[Source]) {
        let when = self.when(scope);
        let tokens = PassTokens {
            positions: &self.positions,
            sequences: &self.sequences,
        };
        self.recorder.op(when, op, dst, sources, tokens);
        scope.start = self.recorder.start();
    }

    /// Records an expert operation; `lanes` contains where each expert of `routing` was computed.
    pub(super) fn record_experts(
        &mut self,
        scope: &mut Scope,
        op: u8,
        dst: NodeName,
        sources: &[Source],
        (routing, lanes): (&Routing, Lanes),
    ) {
        let when = self.when(scope);
        let routed = RoutedRows {
            tokens: PassTokens {
                positions: &self.positions,
                sequences: &self.sequences,
            },
            routing,
            lanes,
        };
        self.recorder.experts(when, op, dst, sources, &routed);
        scope.start = self.recorder.start_experts();
    }

    fn when(&mut self, scope: &mut Scope) -> When {
        match scope.ran {
            Executor::Cpu => {
                self.devices.ran(DeviceId::Cpu);
                When::Cpu(scope.start)
            }
            Executor::Gpu(device, events) => {
                scope.ran = Executor::Fused;
                events.map_or(When::Fused, |(from, to)| When::Gpu(device, from, to))
            }
            Executor::Fused => When::Fused,
        }
    }
}
