//! Records of an operation, immediately or at the end of the pass: one record, or for expert operations one per token.

use std::sync::Arc;
use std::time::Instant;

use moe_engine::TokenSequence;
use moe_trace::record::{self, MAX_EXPERTS};
use moe_trace::{LayerId, RunWriter, TensorAccessLog};

use super::{Lanes, PassTokens, Recorder, Routing, SelectedExperts, When};
use crate::cuda::{self, Download, Event};
use crate::device_id::DeviceId;
use crate::devices::Devices;
use crate::error::{Error, Result};

/// The tokens of an expert operation. Each has one record, or several if it has more than 16 experts.
pub(super) struct Rows<'a> {
    /// The tokens.
    pub tokens: PassTokens<'a>,
    /// Selected experts `(token, k)`.
    pub ids: &'a [i32],
    /// Their weights `(token, k)`.
    pub weights: &'a [f32],
    /// Selected experts per token.
    pub k: usize,
    /// Their lanes `(token, k)`.
    pub lanes: Lanes<'a>,
}

/// An operation of a session with GPUs, whose time and experts are known at the end of the pass.
pub(super) struct Pending {
    pub record: TensorAccessLog,
    pub when: When,
    /// The tokens of an expert operation.
    pub rows: Option<PendingRows>,
}

/// The tokens of a pending expert operation.
pub(super) struct PendingRows {
    positions: Vec<u32>,
    sequences: Vec<TokenSequence>,
    k: usize,
    experts: SelectedExperts,
    /// One lane for all, or one for each; empty for the late lanes of the layer.
    lanes: Vec<u8>,
}

/// The experts of an operation's tokens.
pub struct RoutedRows<'a> {
    /// The tokens.
    pub tokens: PassTokens<'a>,
    /// Selected experts of each token.
    pub routing: &'a Routing,
    /// Lanes of the experts.
    pub lanes: Lanes<'a>,
}

impl RoutedRows<'_> {
    /// A copy for the end of the pass.
    pub(super) fn keep(&self) -> PendingRows {
        PendingRows {
            positions: self.tokens.positions.to_vec(),
            sequences: self.tokens.sequences.to_vec(),
            k: self.routing.n_expert_used,
            experts: SelectedExperts::new(self.routing),
            lanes: match self.lanes {
                Lanes::All(lane) => vec![lane],
                Lanes::Each(lanes) => lanes.to_vec(),
                Lanes::Late => Vec::new(),
            },
        }
    }
}

/// Writes one record.
pub(super) fn write_one(
    writer: &mut RunWriter,
    record: &TensorAccessLog,
) -> Result<(), moe_trace::Error> {
    writer.next_record()?.clone_from(record);
    Ok(())
}

impl Rows<'_> {
    /// Writes the records of all tokens; `record` has the fields that they share.
    pub(super) fn write(
        &self,
        writer: &mut RunWriter,
        record: &TensorAccessLog,
    ) -> Result<(), moe_trace::Error> {
        let k = self.k;
        for (row, token) in self.tokens.iter().enumerate() {
            for base in (0..k).step_by(MAX_EXPERTS) {
                let out = writer.next_record()?;
                out.clone_from(record);
                let slots = row * k + base..row * k + (base + MAX_EXPERTS).min(k);
                token.write(out);
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

/// Results of a completed pass on GPUs. Tests implement it without a GPU.
pub(crate) trait Finished {
    /// The time of a GPU event of the pass, on the CPU's clock.
    ///
    /// # Errors
    /// The pass has not ended.
    fn time(&self, gpu: DeviceId, event: Event) -> cuda::Result<Instant>;

    /// Ids and weights of selected experts that were copied from a GPU in the pass.
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
    /// Finds the times and experts of the pending operations of a completed pass, and writes them.
    pub(super) fn write_pending(&mut self, gpus: &impl Finished) -> Result<()> {
        let Some(output) = &mut self.output else {
            return Ok(());
        };
        // Start of the previous operation, and end of its kernel.
        let mut start_ns = self.clock.ns(self.pass_start);
        let mut end_ns = start_ns;
        // Operations of a layer have the same experts.
        let mut last: Option<(Download, SelectedExperts)> = None;
        for Pending { record, when, rows } in &mut self.pending {
            let span = match *when {
                When::Cpu(_) => None,
                When::Gpu(gpu, from, to) => {
                    let [from, to] = [gpus.time(gpu, from)?, gpus.time(gpu, to)?];
                    let [from, to] = [from, to].map(|at| self.clock.ns(at));
                    Some((from, to.saturating_sub(from)))
                }
                When::Fused => Some((end_ns.min(start_ns + 1), 0)),
            };
            if let Some((start, duration)) = span {
                record.timestamp_ns.set(start);
                record.duration_ns.set(duration);
            }
            start_ns = record.timestamp_ns.get();
            if !matches!(when, When::Fused) {
                end_ns = start_ns + record.duration_ns.get();
            }
            let Some(rows) = rows else {
                continue;
            };
            if let SelectedExperts::InFlight(copy) = rows.experts {
                let experts = match &last {
                    Some((known, experts)) if *known == copy => experts.clone(),
                    _ => {
                        let (ids, weights) = rows.experts.read(gpus)?;
                        SelectedExperts::Here(Arc::from(ids), Arc::from(weights))
                    }
                };
                last = Some((copy, experts.clone()));
                rows.experts = experts;
            }
            if rows.lanes.is_empty()
                && let Some(late) = self.late_lanes.get(&LayerId(record.layer_id.get()))
            {
                rows.lanes.clone_from(late);
            }
        }
        output.write_pass(&mut self.pending).map_err(Error::Trace)
    }
}

/// Writes the operations of a completed pass, whose times and experts are known, in the order of their starts.
pub(super) fn write_pass(writer: &mut RunWriter, pass: &[Pending]) -> Result<(), moe_trace::Error> {
    let mut order: Vec<&Pending> = pass.iter().collect();
    // The sort is stable: operations with the same start keep the order of the graph.
    order.sort_by_key(|pending| pending.record.timestamp_ns.get());
    for Pending { record, rows, .. } in order {
        match rows {
            None => write_one(writer, record)?,
            Some(rows) => rows.write(writer, record)?,
        }
    }
    Ok(())
}

impl PendingRows {
    fn write(
        &self,
        writer: &mut RunWriter,
        record: &TensorAccessLog,
    ) -> Result<(), moe_trace::Error> {
        let SelectedExperts::Here(ids, weights) = &self.experts else {
            return Ok(());
        };
        let rows = Rows {
            tokens: PassTokens {
                positions: &self.positions,
                sequences: &self.sequences,
            },
            ids,
            weights,
            k: self.k,
            lanes: match self.lanes.as_slice() {
                [lane] => Lanes::All(*lane),
                [] => Lanes::Late,
                lanes => Lanes::Each(lanes),
            },
        };
        rows.write(writer, record)
    }
}
