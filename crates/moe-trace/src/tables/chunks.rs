//! The trace cut into chunks of whole operations, each with what is known before it, so that chunks can be worked on side
//! by side.

use std::ops::RangeInclusive;

use crate::operations::Operations;
use crate::record::TensorAccessLog;
use crate::routing::FirstOfLayer;

/// Records of a chunk: a row group of few rows is read slowly, as each of its columns has a fixed cost, and one of many takes
/// memory.
const CHUNK_RECORDS: RangeInclusive<usize> = 64 * 1024..=256 * 1024;
/// Chunks of a trace that has records enough, at least: there should be work for many threads.
const N_CHUNKS: usize = 16;

/// Some operations in a row.
pub(crate) struct Chunk<'a> {
    /// Number of the first operation.
    pub first_op: u64,
    /// The operations.
    pub operations: Operations<'a>,
    /// Records in them.
    pub n_records: u64,
    /// What the operations before it say about the routing.
    pub routing: FirstOfLayer<'a>,
}

/// Cuts chunks off.
pub(crate) struct Chunks<'a> {
    rest: &'a [TensorAccessLog],
    /// Records of a chunk, at least: its last operation is whole.
    size: usize,
    next: Chunk<'a>,
    next_record: u64,
}

impl<'a> Chunks<'a> {
    pub(crate) fn new(records: &'a [TensorAccessLog], mul_mat_id: Option<u8>) -> Self {
        let next = Chunk {
            first_op: 0,
            operations: Operations::new(&[]),
            n_records: 0,
            routing: FirstOfLayer::new(mul_mat_id),
        };
        Self {
            rest: records,
            size: (records.len() / N_CHUNKS).clamp(*CHUNK_RECORDS.start(), *CHUNK_RECORDS.end()),
            next,
            next_record: 0,
        }
    }
}

impl<'a> Iterator for Chunks<'a> {
    type Item = Chunk<'a>;

    fn next(&mut self) -> Option<Chunk<'a>> {
        let Chunk {
            first_op, routing, ..
        } = self.next;
        let mut n_ops = 0;
        let mut n_records = 0;
        for operation in Operations::new(self.rest) {
            self.next.routing.takes(&operation);
            n_ops += 1;
            n_records += operation.records().len();
            if n_records >= self.size {
                break;
            }
        }
        if n_records == 0 {
            return None;
        }
        let (records, rest) = self.rest.split_at(n_records);
        let operations = Operations::starting_at(records, self.next_record);
        let n_records = n_records as u64;
        self.rest = rest;
        self.next_record += n_records;
        self.next.first_op += n_ops;
        Some(Chunk {
            first_op,
            operations,
            n_records,
            routing,
        })
    }
}
