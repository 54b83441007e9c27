//! Records of an operation: one, or one for each row of a choice; at once, or at the end of the pass.

use std::time::Instant;

use moe_trace::record::{self, MAX_EXPERTS};
use moe_trace::{RunWriter, TensorAccessLog};

use super::{Lanes, Recorder, Routing, When};
use crate::cuda::{self, Download, Event};
use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::placement::DeviceId;

/// The rows of an expert operation: one record each, more when a row has over 16 experts.
pub(super) struct Rows<'a> {
    pub positions: &'a [u32],
    pub ids: &'a [i32],
    pub weights: &'a [f32],
    pub k: usize,
    pub lanes: Lanes<'a>,
}

/// An operation of a pass that GPUs take part in: its time and its experts are known when the pass is over.
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
pub struct RoutedRows<'a> {
    /// Position of each row.
    pub positions: &'a [u32],
    /// Experts of each row.
    pub routing: &'a Routing,
    /// Where each was computed.
    pub lanes: Lanes<'a>,
}

impl RoutedRows<'_> {
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

/// What the GPUs know once a pass has ended.
pub(super) trait Finished {
    /// When an event of the pass was on a GPU.
    ///
    /// # Errors
    /// The pass has not ended.
    fn time(&self, gpu: DeviceId, event: Event) -> cuda::Result<Instant>;

    /// Experts and weights that were copied in the pass.
    ///
    /// # Errors
    /// The pass has not ended.
    fn downloaded(&self, download: &Download) -> cuda::Result<(&[i32], &[f32])>;
}

impl Finished for Devices<'_> {
    fn time(&self, gpu: DeviceId, event: Event) -> cuda::Result<Instant> {
        Devices::time(self, gpu, event)
    }

    fn downloaded(&self, download: &Download) -> cuda::Result<(&[i32], &[f32])> {
        Devices::downloaded(self, download)
    }
}

impl Recorder {
    /// Writes the operations that waited for the end of the pass, in the order of their starts.
    pub(super) fn settle(&mut self, gpus: &impl Finished) -> Result<()> {
        let Some(writer) = &mut self.writer else {
            return Ok(());
        };
        // Start of the operation before, and end of its kernel.
        let mut start_ns = self.clock.ns(self.pass_start);
        let mut end_ns = start_ns;
        for Pending { record, when, .. } in &mut self.pending {
            let span = match *when {
                When::Host(_) => None,
                When::Gpu(gpu, from, to) => {
                    let [from, to] = [gpus.time(gpu, from)?, gpus.time(gpu, to)?];
                    let [from, to] = [from, to].map(|at| self.clock.ns(at));
                    Some((from, to.saturating_sub(from)))
                }
                When::Within => Some((end_ns.min(start_ns + 1), 0)),
            };
            if let Some((start, duration)) = span {
                record.timestamp_ns.set(start);
                record.duration_ns.set(duration);
            }
            start_ns = record.timestamp_ns.get();
            if !matches!(when, When::Within) {
                end_ns = start_ns + record.duration_ns.get();
            }
        }
        let start = |&at: &usize| self.pending[at].record.timestamp_ns.get();
        self.order.clear();
        self.order.extend(0..self.pending.len());
        // Stable: operations with one start keep the order of the graph.
        self.order.sort_by_key(start);
        for &at in &self.order {
            let Pending { record, rows, .. } = &self.pending[at];
            let written = match rows {
                None => one(writer, record),
                Some(rows) => {
                    let (ids, weights) = match &rows.chosen {
                        Chosen::Known(ids, weights) => (ids.as_slice(), weights.as_slice()),
                        Chosen::OnItsWay(copy) => gpus.downloaded(copy)?,
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
                    rows.write(writer, record)
                }
            };
            written.map_err(Error::Trace)?;
        }
        self.pending.clear();
        Ok(())
    }
}
