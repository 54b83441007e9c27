//! Order in which layers are read.

use moe_trace::LayerId;

use super::Event;

/// Whether layers are read in ascending order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerOrder {
    /// Number of passes that read tensors of any layer.
    pub passes: u64,
    /// Number of passes that never return to a lower layer.
    pub passes_in_order: u64,
    /// Number of steps: pairs of consecutive accesses to different layers within a pass.
    pub steps: u64,
    /// Number of steps to the next layer (layer + 1).
    pub steps_to_next: u64,
    /// Number of steps to a lower layer.
    pub steps_back: u64,
}

#[derive(Default)]
pub(super) struct OrderCounter {
    order: LayerOrder,
    last: Option<LayerId>,
    went_back: bool,
}

impl OrderCounter {
    pub(super) fn access(&mut self, event: &Event) {
        let Some(layer) = event.layer else { return };
        if let Some(last) = self.last.replace(layer)
            && last != layer
        {
            self.order.steps += 1;
            self.order.steps_to_next += u64::from(last.0.checked_add(1) == Some(layer.0));
            self.order.steps_back += u64::from(layer < last);
            self.went_back |= layer < last;
        }
    }

    pub(super) fn end_pass(&mut self) {
        if self.last.take().is_some() {
            self.order.passes += 1;
            self.order.passes_in_order += u64::from(!self.went_back);
        }
        self.went_back = false;
    }

    pub(super) fn finish(self) -> LayerOrder {
        self.order
    }
}
