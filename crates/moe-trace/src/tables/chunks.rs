//! Splits a trace into chunks of complete operations. Each chunk contains the state before it, so that threads can process
//! chunks in parallel.

use std::ops::RangeInclusive;

use crate::first_of_layer::FirstOfLayer;
use crate::operations::Operations;
use crate::record::TensorAccessLog;

/// Records of a chunk. A chunk becomes a row group: small ones are slow to read, because each column has a fixed cost, and
/// large ones need memory.
const CHUNK_RECORDS: RangeInclusive<usize> = 64 * 1024..=256 * 1024;
/// Minimum number of chunks of a large trace, so that many threads have work.
const N_CHUNKS: usize = 16;

/// Consecutive operations.
pub(crate) struct Chunk<'a> {
    /// Index of the first operation.
    pub first_op: u64,
    /// The operations.
    pub operations: Operations<'a>,
    /// Number of records in them.
    pub n_records: u64,
    /// The state of the routing selection after all operations before the chunk.
    pub routing: FirstOfLayer<'a>,
}

/// Iterator over the chunks of a trace.
pub(crate) struct Chunks<'a> {
    rest: &'a [TensorAccessLog],
    /// Minimum number of records of a chunk. Chunks are larger by the rest of their last operation.
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
