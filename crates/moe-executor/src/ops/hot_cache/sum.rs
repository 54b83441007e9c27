//! The sum of the results of all lanes.

use super::call::LaneCall;
use super::launch::GpuLanes;
use crate::activation::{Activation, NodeName};
use crate::cpu::disjoint::Disjoint;
use crate::device_id::DeviceId;
use crate::hot_cache::N_LANES;
use crate::ops::{Ops, Scope, number, router};
use crate::recorder::{Routing, Source};

impl Ops<'_> {
    /// Adds the results of all lanes and records the operations. `rows` contains the products of the lanes on the CPU, if it
    /// `computes` any.
    pub(super) fn sum_lanes(
        &mut self,
        mut scope: Scope,
        call: &LaneCall,
        gpus: &mut GpuLanes,
        (rows, computes): (&mut Activation, bool),
        routing: &Routing,
        dst: &mut Activation,
    ) {
        let is_on_gpu = gpus.is_on;
        let is_shared = is_on_gpu.contains(&true);
        if computes && is_shared {
            let sum = &mut gpus.sums.cpu;
            sum.shape(dst.name, dst.width, dst.rows);
            self.sum_rows(call, &is_on_gpu, rows, sum);
        } else if computes {
            self.sum_rows(call, &is_on_gpu, rows, dst);
        }
        let nodes = call.nodes;
        if !nodes.merge.weights_first {
            let before = Source::from(&*rows);
            rows.name = NodeName::of("ffn_moe_weighted", nodes.at.il);
            let sources = [before, router::weights(nodes.merge.weights, routing)];
            self.record(&mut scope, number::MUL, rows.name, &sources);
        }
        let on_gpu = gpus.sums.gpu.iter_mut().zip(is_on_gpu);
        let on_gpu = on_gpu.filter_map(|(sum, is_on)| is_on.then_some(sum));
        let on_cpu = (computes && is_shared).then_some(&mut gpus.sums.cpu);
        let mut merged = None;
        // The first lane on a GPU wrote `dst`.
        for sum in on_gpu.skip(1).chain(on_cpu) {
            merged = Some(self.add_lane(nodes.at.device, sum, dst));
        }
        self.record_sum(scope, merged, call, rows, dst);
    }

    /// `sum[t] = Σ weight · row` over the entries of each token that the CPU computed, in the order of its slots. `rows` has the
    /// order of the worklist.
    fn sum_rows(
        &self,
        call: &LaneCall,
        is_on_gpu: &[bool; N_LANES],
        rows: &Activation,
        sum: &mut Activation,
    ) {
        let (work, k, width) = (call.work, call.k, rows.width);
        let (rows, weights) = (rows.data(), work.weights());
        let is_weighted = !call.nodes.merge.weights_first;
        // Columns are split, too: a single token would run on one thread.
        const COLUMNS: usize = 512;
        let chunks = width.div_ceil(COLUMNS);
        let tokens = sum.rows;
        let out = Disjoint::new(sum.data_mut());
        let bytes = work.len() * width * size_of::<f32>();
        self.threads.split(tokens * chunks, bytes, |range| {
            for at in range {
                let (token, first) = (at / chunks, at % chunks * COLUMNS);
                let n = COLUMNS.min(width - first);
                let start = token * width + first;
                // SAFETY: `split` passes disjoint ranges, and each index has columns of its own.
                let out = unsafe { out.slice(start..start + n) };
                let mut is_first = true;
                for entry in token * k..(token + 1) * k {
                    if is_on_gpu[work.lanes()[entry] as usize] {
                        continue;
                    }
                    let at = work.positions()[entry] as usize;
                    let row = &rows[at * width + first..][..n];
                    let weight = if is_weighted { weights[at] } else { 1.0 };
                    let pairs = out.iter_mut().zip(row);
                    if is_first {
                        pairs.for_each(|(o, x)| *o = x * weight)
                    } else {
                        pairs.for_each(|(o, x)| *o += x * weight)
                    }
                    is_first = false;
                }
                if is_first {
                    out.fill(0.0);
                }
            }
        });
    }

    /// Adds the sum of a lane to `dst` on `device`. Returns the scope of the addition.
    fn add_lane(&mut self, device: DeviceId, sum: &mut Activation, dst: &mut Activation) -> Scope {
        let mut scope = self.start();
        if !self.on(&mut scope, device, |gpu| gpu.add_to(dst, sum)) {
            self.fetch(&mut dst.values);
            self.fetch(&mut sum.values);
            let pairs = dst.data_mut().iter_mut().zip(sum.data());
            pairs.for_each(|(out, x)| *out += x);
        }
        scope
    }

    /// Records the additions of the weighted sum. `merged` is the scope of the last addition of a lane; then the last record has
    /// its time.
    fn record_sum(
        &mut self,
        mut scope: Scope,
        mut merged: Option<Scope>,
        call: &LaneCall,
        experts: &Activation,
        dst: &mut Activation,
    ) {
        let (il, k) = (call.nodes.at.il, call.k);
        for slot in 1..k.max(2) {
            let summed = Source::from(&*dst);
            let last = slot + 1 >= k;
            dst.name = if last {
                call.nodes.merge.sum
            } else {
                NodeName::of("ffn_moe_sum", il)
            };
            let view = Source::slots(experts, k);
            let (op, sources): (u8, &[Source]) = match (slot, k) {
                (1, 1) => (number::CONT, &[view]),
                (1, _) => (number::ADD, &[view, view]),
                _ => (number::ADD, &[summed, view]),
            };
            let merged = merged.as_mut().filter(|_| last);
            self.record(merged.unwrap_or(&mut scope), op, dst.name, sources);
        }
    }
}
