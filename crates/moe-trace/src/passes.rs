//! The passes of a trace: one walk over the model's graph each, for a batch of a prompt or for one generated token.

use moe_ids::{LayerId, TokenId};

use crate::operations::{Operation, Operations};
use crate::phase::Phase;
use crate::record::TensorAccessLog;

/// Tells, operation by operation and in order, where a pass begins.
///
/// A pass goes through the layers in order, so a lower layer than before is the next pass. What comes before the first
/// layer (the embeddings) belongs to no layer, as does what comes behind the last: there a pass begins when its first
/// operation comes again. In a layer a name can come twice (`norm-3`), so that an operation of a layer counts as coming
/// again for another token only.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassStarts<'a> {
    first: Option<&'a TensorAccessLog>,
    last_layer: Option<LayerId>,
}

impl<'a> PassStarts<'a> {
    /// Before the first operation.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a pass begins with `operation`, the one that follows those asked about before.
    pub fn begins(&mut self, operation: &Operation<'a>) -> bool {
        let head = operation.head();
        let layer = head.layer();
        let begins = match self.first {
            None => true,
            Some(first) => {
                let is_back = layer.is_some() && layer < self.last_layer;
                is_back || is_again(first, head)
            }
        };
        if begins {
            self.first = Some(head);
            self.last_layer = None;
        }
        self.last_layer = layer.or(self.last_layer);
        begins
    }
}

fn is_again(first: &TensorAccessLog, head: &TensorAccessLog) -> bool {
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

/// One pass.
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
        // For the first operation of a pass this was asked when the pass before it ended.
        if self.starts.first.is_none() {
            self.starts.begins(&first);
        }
        let mut n_operations = 1;
        loop {
            let here = self.rest.clone();
            match self.rest.next() {
                Some(operation) if !self.starts.begins(&operation) => n_operations += 1,
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
    /// Its operations.
    pub fn operations(&self) -> impl Iterator<Item = Operation<'a>> + use<'a> {
        self.operations.clone().take(self.n_operations)
    }

    /// How many there are.
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
