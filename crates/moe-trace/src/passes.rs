//! The forward passes of a trace: each is one execution of the model's graph, for a ubatch of the prompt or a generated token.

use moe_ids::{LayerId, TokenId};

use crate::operations::{Operation, Operations};
use crate::phase::Phase;
use crate::record::TensorAccessLog;

/// Finds the first operation of each pass. It takes all operations in order.
///
/// A pass computes the layers in ascending order, so a lower layer than before starts a new pass. Operations before the first
/// layer (embeddings) and after the last have no layer. Among these, a pass starts when its first operation is repeated.
/// A name can occur twice in a layer (`norm-3`), so an operation of a layer is a repetition only for another token.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassStarts<'a> {
    first: Option<&'a TensorAccessLog>,
    last_layer: Option<LayerId>,
}

impl<'a> PassStarts<'a> {
    /// The state before the first operation.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether `operation`, which follows the operation of the previous call, is the first of a pass.
    pub fn is_start(&mut self, operation: &Operation<'a>) -> bool {
        let head = operation.head();
        let layer = head.layer();
        let is_start = match self.first {
            None => true,
            Some(first) => {
                let is_back = layer.is_some() && layer < self.last_layer;
                is_back || is_repetition(first, head)
            }
        };
        if is_start {
            self.first = Some(head);
            self.last_layer = None;
        }
        self.last_layer = layer.or(self.last_layer);
        is_start
    }
}

fn is_repetition(first: &TensorAccessLog, head: &TensorAccessLog) -> bool {
    let of = |record: &TensorAccessLog| {
        let sequence = record.has_extension().then(|| record.sequence_id.get());
        (record.token_id.get(), sequence, record.phase)
    };
    first.operation_type == head.operation_type
        && first.dst_name_bytes() == head.dst_name_bytes()
        && (head.layer().is_none() || of(first) != of(head))
}

/// The passes of a trace in order.
#[derive(Clone, Debug)]
pub struct Passes<'a> {
    rest: Operations<'a>,
    starts: PassStarts<'a>,
}

/// A pass.
#[derive(Clone, Debug)]
pub struct RecordedPass<'a> {
    head: &'a TensorAccessLog,
    operations: Operations<'a>,
    n_operations: usize,
}

impl<'a> Passes<'a> {
    /// The passes of `operations`.
    pub fn new(operations: Operations<'a>) -> Self {
        Self {
            rest: operations,
            starts: PassStarts::new(),
        }
    }
}

impl<'a> Iterator for Passes<'a> {
    type Item = RecordedPass<'a>;

    fn next(&mut self) -> Option<RecordedPass<'a>> {
        let operations = self.rest.clone();
        let first = self.rest.next()?;
        // For later passes, `is_start` was called for the first operation at the end of the previous pass.
        if self.starts.first.is_none() {
            self.starts.is_start(&first);
        }
        let mut n_operations = 1;
        loop {
            let here = self.rest.clone();
            match self.rest.next() {
                Some(operation) if !self.starts.is_start(&operation) => n_operations += 1,
                Some(_) => {
                    self.rest = here;
                    break;
                }
                None => break,
            }
        }
        Some(RecordedPass {
            head: first.head(),
            operations,
            n_operations,
        })
    }
}

impl<'a> RecordedPass<'a> {
    /// The operations.
    pub fn operations(&self) -> impl Iterator<Item = Operation<'a>> + use<'a> {
        self.operations.clone().take(self.n_operations)
    }

    /// The number of operations.
    pub fn n_operations(&self) -> usize {
        self.n_operations
    }

    /// Phase of its first operation.
    pub fn phase(&self) -> Option<Phase> {
        self.head.phase()
    }

    /// Position of its first token.
    pub fn token_id(&self) -> TokenId {
        self.head.token()
    }
}
