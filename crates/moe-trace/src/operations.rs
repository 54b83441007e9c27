//! Groups records into operations, and the records of an operation into tokens.

use std::sync::atomic::{AtomicU64, Ordering};

use moe_ids::{ExpertId, TokenId};
use zerocopy::little_endian::I32;

use crate::record::{TensorAccessLog, lane};

/// The operations of a trace in order.
#[derive(Clone, Debug)]
pub struct Operations<'a> {
    rest: &'a [TensorAccessLog],
    next_record: u64,
    position: Option<&'a AtomicU64>,
}

impl<'a> Operations<'a> {
    /// Groups `records`. A record with timestamp 0 ends the iteration.
    pub fn new(records: &'a [TensorAccessLog]) -> Self {
        Self::starting_at(records, 0)
    }

    /// Like [`Operations::new`], for `records` that start at record `first_record` of the trace.
    pub(crate) fn starting_at(records: &'a [TensorAccessLog], first_record: u64) -> Self {
        Self {
            rest: records,
            next_record: first_record,
            position: None,
        }
    }

    /// Stores the index of the current record in `position`.
    pub(crate) fn reporting_to(self, position: &'a AtomicU64) -> Self {
        Self {
            position: Some(position),
            ..self
        }
    }
}

impl<'a> Iterator for Operations<'a> {
    type Item = Operation<'a>;

    fn next(&mut self) -> Option<Operation<'a>> {
        let first = self
            .rest
            .first()
            .filter(|record| record.timestamp_ns.get() != 0)?;
        let more = self.rest[1..]
            .iter()
            .take_while(|record| same_operation(first, record))
            .count();
        let (records, rest) = self.rest.split_at(1 + more);
        self.rest = rest;
        let first_record = self.next_record;
        self.next_record += records.len() as u64;
        if let Some(position) = self.position {
            position.store(self.next_record, Ordering::Relaxed);
        }
        Some(Operation {
            first_record,
            records,
        })
    }
}

/// Whether two records belong to one operation: their timestamp, operation number and result are equal.
fn same_operation(a: &TensorAccessLog, b: &TensorAccessLog) -> bool {
    a.timestamp_ns == b.timestamp_ns
        && a.operation_type == b.operation_type
        && a.dst_name_bytes() == b.dst_name_bytes()
}

/// An operation: one record, or, for an expert operation, at least one record for each token of the batch.
#[derive(Clone, Copy, Debug)]
pub struct Operation<'a> {
    first_record: u64,
    records: &'a [TensorAccessLog],
}

impl<'a> Operation<'a> {
    /// The records; never empty.
    pub fn records(&self) -> &'a [TensorAccessLog] {
        self.records
    }

    /// The first record. Operation, result, layer, sources and times are equal in all records.
    pub fn head(&self) -> &'a TensorAccessLog {
        &self.records[0]
    }

    /// Index of the first record in the trace.
    pub fn first_record(&self) -> u64 {
        self.first_record
    }

    /// The tokens of the batch. Continuation records belong to the token of the preceding record.
    pub fn tokens(&self) -> impl Iterator<Item = TokenExperts<'a>> + use<'a> {
        let mut rest = self.records;
        std::iter::from_fn(move || {
            let (_, more) = rest.split_first()?;
            let n = 1 + more
                .iter()
                .take_while(|record| record.is_continuation())
                .count();
            let (records, tail) = rest.split_at(n);
            rest = tail;
            Some(TokenExperts { records })
        })
    }
}

/// The experts of one token in one expert operation.
#[derive(Clone, Copy, Debug)]
pub struct TokenExperts<'a> {
    records: &'a [TensorAccessLog],
}

/// An expert that the router selected for a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expert {
    /// Rank in the token's top-k; 0 is the best.
    pub slot: u16,
    /// Id of the expert in its layer.
    pub expert_id: ExpertId,
    /// Router weight as applied; `None` in records without extension.
    pub weight: Option<f32>,
    /// Where it was computed, a value of [`lane`]; [`lane::UNKNOWN`] in records without extension.
    pub lane: u8,
}

impl<'a> TokenExperts<'a> {
    /// The first record of the token.
    pub fn head(&self) -> &'a TensorAccessLog {
        &self.records[0]
    }

    /// The records: one, or several for more than 16 experts.
    pub fn records(&self) -> &'a [TensorAccessLog] {
        self.records
    }

    /// Position of the token in its sequence.
    pub fn token_id(&self) -> TokenId {
        self.head().token()
    }

    /// Sequence of the token; `None` in records without extension.
    pub fn sequence_id(&self) -> Option<u32> {
        self.head()
            .has_extension()
            .then(|| self.head().sequence_id.get())
    }

    /// The selected experts, best first. Negative ids (empty slots) are omitted.
    pub fn experts(&self) -> impl Iterator<Item = Expert> + use<'a> {
        self.records.iter().flat_map(|record| {
            let extended = record.has_extension();
            let base = if extended {
                u16::from(record.expert_slot_base)
            } else {
                0
            };
            record
                .expert_ids()
                .iter()
                .zip(0u16..)
                .filter_map(move |(id, i)| {
                    let k = usize::from(i);
                    Some(Expert {
                        slot: base + i,
                        expert_id: expert_id(id)?,
                        weight: extended.then(|| record.expert_weights[k].get()),
                        lane: if extended {
                            record.expert_lane[k]
                        } else {
                            lane::UNKNOWN
                        },
                    })
                })
        })
    }
}

/// An expert id; `None` for an empty slot.
pub(crate) fn expert_id(id: &I32) -> Option<ExpertId> {
    ExpertId::try_from(id.get()).ok()
}
