//! Records of an operation: one, or one for each row of a choice; at once, or at the end of the pass.

use moe_trace::record::{self, MAX_EXPERTS};
use moe_trace::{RunWriter, TensorAccessLog};

use super::{Lanes, Recorder, Routing, When};
use crate::cuda::{Device, Download};
use crate::error::{Error, Result};

/// The rows of an expert operation: one record each, more when a row has over 16 experts.
pub(super) struct Rows<'a> {
    pub positions: &'a [u32],
    pub ids: &'a [i32],
    pub weights: &'a [f32],
    pub k: usize,
    pub lanes: Lanes<'a>,
}

/// An operation of a pass that the GPU takes part in: its time and its experts are known when the pass is over.
pub(super) struct Pending {
    pub record: TensorAccessLog,
    pub when: When,
    pub rows: Option<PendingRows>,
}

/// The rows of a pending expert operation.
pub(super) struct PendingRows {
    positions: Vec<u32>,
    k: usize,
    chosen: Chosen,
    /// One for all, or one for each.
    lanes: Vec<u8>,
}

enum Chosen {
    Known(Vec<i32>, Vec<f32>),
    OnItsWay(Download),
}

/// The experts of an operation's rows.
pub struct Choice<'a> {
    /// Position of each row.
    pub positions: &'a [u32],
    /// Experts of each row.
    pub routing: &'a Routing,
    /// Where each was computed.
    pub lanes: Lanes<'a>,
}

impl Choice<'_> {
    pub(super) fn keep(&self) -> PendingRows {
        let routing = self.routing;
        let chosen = match routing.copy {
            Some(copy) => Chosen::OnItsWay(copy),
            None => Chosen::Known(routing.ids.host().to_vec(), routing.weights.host().to_vec()),
        };
        PendingRows {
            positions: self.positions.to_vec(),
            k: routing.n_expert_used,
            chosen,
            lanes: match self.lanes {
                Lanes::All(lane) => vec![lane],
                Lanes::Each(lanes) => lanes.to_vec(),
            },
        }
    }
}

pub(super) fn one(
    writer: &mut RunWriter,
    record: &TensorAccessLog,
) -> Result<(), moe_trace::Error> {
    writer.next_record()?.clone_from(record);
    Ok(())
}

impl Rows<'_> {
    pub(super) fn write(
        &self,
        writer: &mut RunWriter,
        record: &TensorAccessLog,
    ) -> Result<(), moe_trace::Error> {
        let k = self.k;
        for (row, position) in self.positions.iter().enumerate() {
            for base in (0..k).step_by(MAX_EXPERTS) {
                let out = writer.next_record()?;
                out.clone_from(record);
                let slots = row * k + base..row * k + (base + MAX_EXPERTS).min(k);
                out.token_id.set(*position);
                out.num_experts = slots.len() as u8;
                out.expert_slot_base = base as u8;
                if base > 0 {
                    out.flags |= record::FLAG_CONTINUATION;
                }
                for (at, slot) in slots.enumerate() {
                    out.expert_ids[at].set(self.ids[slot]);
                    out.expert_weights[at].set(self.weights[slot]);
                    out.expert_lane[at] = self.lanes.of(slot);
                }
            }
        }
        Ok(())
    }
}

impl Recorder {
    /// Writes what waited for the end of the pass.
    pub(super) fn settle(&mut self, device: &Device) -> Result<()> {
        let Some(writer) = &mut self.writer else {
            return Ok(());
        };
        let mut last_ns = 0;
        for pending in self.pending.drain(..) {
            let mut record = pending.record;
            match pending.when {
                When::Host(_) => {}
                When::Gpu(from, to) => {
                    let (from, to) = (device.time(from)?, device.time(to)?);
                    record.timestamp_ns.set(self.clock.ns(from));
                    let duration = to.saturating_duration_since(from);
                    record.duration_ns.set(duration.as_nanos() as u64);
                }
                When::Within => {
                    // Behind the one that has the kernel's time, so that operations keep their order.
                    record.timestamp_ns.set(last_ns + 1);
                    record.duration_ns.set(0);
                }
            }
            last_ns = record.timestamp_ns.get();
            let written = match &pending.rows {
                None => one(writer, &record),
                Some(rows) => {
                    let (ids, weights) = match &rows.chosen {
                        Chosen::Known(ids, weights) => (ids.as_slice(), weights.as_slice()),
                        Chosen::OnItsWay(copy) => device.downloaded(copy),
                    };
                    let lanes = match rows.lanes.as_slice() {
                        [lane] => Lanes::All(*lane),
                        lanes => Lanes::Each(lanes),
                    };
                    let rows = Rows {
                        positions: &rows.positions,
                        ids,
                        weights,
                        k: rows.k,
                        lanes,
                    };
                    rows.write(writer, &record)
                }
            };
            written.map_err(Error::Trace)?;
        }
        Ok(())
    }
}
