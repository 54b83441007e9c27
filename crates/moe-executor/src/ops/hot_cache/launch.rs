//! The lanes on GPUs.

use moe_placement::perf::LaneIndex;

use super::call::LaneCall;
use crate::activation::Activation;
use crate::cuda::{Entries, HotCall, HotInput};
use crate::device_id::DeviceId;
use crate::hot_cache::{LaneEvents, LaneSums, N_LANES, Span};
use crate::ops::{Ops, Scope};

/// The lanes of a call that GPUs compute.
pub(super) struct GpuLanes<'c> {
    /// Activations on the GPU of each lane that has entries.
    inputs: [Option<HotInput>; N_LANES],
    /// Whether each lane was launched.
    pub(super) is_on: [bool; N_LANES],
    /// The first lane, which writes the result of the layer. The others are added to it.
    pub(super) first: Option<Scope>,
    /// Start and end of each lane, if they are measured.
    pub(super) spans: [Option<Span>; N_LANES],
    /// Results of the other lanes.
    pub(super) sums: &'c mut LaneSums,
    /// Memory for operands.
    staged: &'c mut Vec<u32>,
    /// Counts failures.
    pub(super) events: &'c mut LaneEvents,
}

impl<'c> GpuLanes<'c> {
    /// No lanes yet.
    pub(super) fn new(
        sums: &'c mut LaneSums,
        staged: &'c mut Vec<u32>,
        events: &'c mut LaneEvents,
    ) -> GpuLanes<'c> {
        GpuLanes {
            inputs: [None; N_LANES],
            is_on: [false; N_LANES],
            first: None,
            spans: [None; N_LANES],
            sums,
            staged,
            events,
        }
    }

    /// Copies `x (token, n_embd)` to the GPUs whose lanes have entries.
    pub(super) fn copy_inputs(&mut self, ops: &mut Ops, call: &LaneCall, x: &mut Activation) {
        for (lane, &gpu) in LaneIndex::HOT.into_iter().zip(call.devices) {
            if !call.has(lane) || gpu == DeviceId::Cpu {
                continue;
            }
            let input = &mut self.inputs[lane as usize];
            let mut copied = ops.start();
            let is_copied = ops.try_on(&mut copied, gpu, false, |gpu| {
                *input = Some(gpu.hot_input(x)?);
                Ok(())
            });
            if !is_copied {
                self.events.failed(ops.failure(gpu));
            }
        }
    }

    /// Whether a GPU is to compute a lane.
    pub(super) fn is_planned(&self, lane: LaneIndex) -> bool {
        self.inputs[lane as usize].is_some()
    }

    /// Whether a GPU was to compute a lane, but could not launch it.
    pub(super) fn has_failed(&self, lane: LaneIndex) -> bool {
        self.is_planned(lane) && !self.is_on[lane as usize]
    }

    /// Launches all lanes. The first one writes `dst (token, n_embd)`.
    pub(super) fn launch(&mut self, ops: &mut Ops, call: &LaneCall, dst: &mut Activation) {
        for (lane, &gpu) in LaneIndex::HOT.into_iter().zip(call.devices) {
            let index = lane as usize;
            let (Some(input), Some(part)) = (self.inputs[index], &call.layer.lanes[index]) else {
                continue;
            };
            let tokens = dst.rows;
            let sum = match self.first {
                None => &mut *dst,
                Some(_) => {
                    self.sums.gpu[index].shape(call.sum_name(), call.n_embd(), tokens);
                    &mut self.sums.gpu[index]
                }
            };
            let dummy = part.experts.len();
            let [.., down] = &call.nodes.projections;
            let factors = down.scales.map(|scales| scales.factors.data.as_slice());
            let hot = HotCall {
                lane: index,
                linears: call.nodes.linears(),
                glu: call.nodes.activation().of_one_kernel(),
                weights_first: call.nodes.merge.weights_first,
                input,
                k: if call.direct_merge && tokens == 1 {
                    call.work.stage_own(lane, factors, self.staged)
                } else {
                    call.work.stage_all(lane, dummy, factors, self.staged);
                    call.k
                },
                tokens,
                entries: Entries::Staged(self.staged),
            };
            let mut launched = ops.start();
            let is_timed = call.is_timed || ops.recorder.is_on();
            self.is_on[index] =
                ops.try_on(&mut launched, gpu, is_timed, |gpu| gpu.hot_lane(&hot, sum));
            if self.is_on[index] {
                self.spans[index] = launched.span();
                self.first.get_or_insert(launched);
            } else {
                self.events.failed(ops.failure(gpu));
            }
        }
        // The CPU computes its lanes now.
        ops.devices.end_operations_before(DeviceId::Cpu);
    }
}
