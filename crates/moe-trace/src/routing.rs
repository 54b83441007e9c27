//! Which expert operations tell the routing: one of a layer in a pass.
//!
//! Gate, up and down of a layer are operations of their own (gate and up may be one, and a model without a gate has two),
//! all with the same experts: counting each would multiply the counts. So the first `MUL_MAT_ID` of a layer in a pass is
//! taken and the others are not, whatever their names.

use crate::operations::{Operation, Operations};
use crate::record::TensorAccessLog;

/// Tells, operation by operation and in order, which ones to take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstOfLayer<'a> {
    mul_mat_id: Option<u8>,
    /// The operation last taken.
    taken: Option<&'a TensorAccessLog>,
}

impl<'a> FirstOfLayer<'a> {
    /// `mul_mat_id` is the number of `MUL_MAT_ID` in the trace; without one there is no routing.
    pub(crate) fn new(mul_mat_id: Option<u8>) -> Self {
        Self {
            mul_mat_id,
            taken: None,
        }
    }

    /// Whether to take `operation`, the one that follows those asked about before.
    ///
    /// A pass goes through the layers in order, so another layer is the next one of the pass or the first one of the next
    /// pass. Where only one layer has experts, the next pass begins when the result that was taken is computed again.
    #[inline]
    pub(crate) fn takes(&mut self, operation: &Operation<'a>) -> bool {
        let head = operation.head();
        if Some(head.operation_type) != self.mul_mat_id || head.num_experts == 0 {
            return false;
        }
        let takes = self.taken.is_none_or(|taken| {
            taken.layer_id != head.layer_id || taken.dst_name_bytes() == head.dst_name_bytes()
        });
        if takes {
            self.taken = Some(head);
        }
        takes
    }
}

/// The operations of a trace that tell its routing; see [`crate::Run::routing`].
#[derive(Clone, Debug)]
pub struct RoutingOperations<'a> {
    operations: Operations<'a>,
    filter: FirstOfLayer<'a>,
}

impl<'a> RoutingOperations<'a> {
    pub(crate) fn new(operations: Operations<'a>, mul_mat_id: Option<u8>) -> Self {
        Self {
            operations,
            filter: FirstOfLayer::new(mul_mat_id),
        }
    }
}

impl<'a> Iterator for RoutingOperations<'a> {
    type Item = Operation<'a>;

    fn next(&mut self) -> Option<Operation<'a>> {
        self.operations
            .by_ref()
            .find(|operation| self.filter.takes(operation))
    }
}
