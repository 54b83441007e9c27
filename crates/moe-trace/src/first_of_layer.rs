//! Selects one expert operation for each layer of a pass, so that each routing decision is counted once.
//!
//! Gate, up and down of a layer are separate operations with the same experts (gate and up may be fused, and a model without
//! a gate has two). Only the first `MUL_MAT_ID` of a layer in a pass is used, independent of its name. Operations on chunk
//! experts do not count: llama.cpp gives them the same names as those on experts.

use crate::operations::{Operation, Operations};
use crate::record::TensorAccessLog;

/// Finds the first expert operation of each layer in each pass. It takes all operations in order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstOfLayer<'a> {
    mul_mat_id: Option<u8>,
    /// The last selected operation.
    taken: Option<&'a TensorAccessLog>,
}

impl<'a> FirstOfLayer<'a> {
    /// `mul_mat_id` is the number of `MUL_MAT_ID` in the trace; with `None`, no operation is selected.
    pub(crate) fn new(mul_mat_id: Option<u8>) -> Self {
        Self {
            mul_mat_id,
            taken: None,
        }
    }

    /// Whether to use `operation`, which follows the operation of the previous call.
    ///
    /// A pass computes the layers in order, so a change of the layer means the next layer or the next pass. If only one layer has
    /// experts, the next pass starts when the result of the selected operation is computed again.
    #[inline]
    pub(crate) fn takes(&mut self, operation: &Operation<'a>) -> bool {
        let head = operation.head();
        if Some(head.operation_type) != self.mul_mat_id
            || head.num_experts == 0
            || head.reads_chunk_experts()
        {
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

/// Iterator over the operations that contain the routing; see [`crate::Run::routing`].
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
