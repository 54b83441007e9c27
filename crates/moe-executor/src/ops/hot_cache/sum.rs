//! The sum of the results of all lanes.

use super::ExpertNodes;
use crate::activation::{Activation, NodeName};
use crate::cpu::disjoint::Disjoint;
use crate::hot_cache::{LaneWorklist, N_LANES};
use crate::ops::{Ops, Scope, number};
use crate::placement::DeviceId;
use crate::recorder::Source;

impl Ops<'_> {
    /// `sum[t] = Σ weight · row` over the entries of each token that the CPU computed, in the order of its slots. `rows` has the
    /// order of the worklist.
    pub(super) fn sum_lanes(
        &self,
        work: &LaneWorklist,
        k: usize,
        on_gpu: &[bool; N_LANES],
        rows: &Activation,
        sum: &mut Activation,
    ) {
        let width = rows.width;
        let (rows, weights) = (rows.data(), work.weights());
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
                    if on_gpu[work.lanes()[entry] as usize] {
                        continue;
                    }
                    let at = work.positions()[entry] as usize;
                    let (row, weight) = (&rows[at * width + first..][..n], weights[at]);
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
    pub(super) fn add_lane(
        &mut self,
        device: DeviceId,
        sum: &mut Activation,
        dst: &mut Activation,
    ) -> Scope {
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
    pub(super) fn record_sum(
        &mut self,
        mut scope: Scope,
        mut merged: Option<Scope>,
        nodes: &ExpertNodes,
        experts: &Activation,
        k: usize,
        dst: &mut Activation,
    ) {
        for slot in 1..k.max(2) {
            let summed = Source::from(&*dst);
            let last = slot + 1 >= k;
            let stem = if last { "ffn_moe_out" } else { "ffn_moe_sum" };
            dst.name = NodeName::of(stem, nodes.il);
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
