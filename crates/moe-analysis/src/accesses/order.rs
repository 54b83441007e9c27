//! Whether layers are read in order.

use moe_trace::LayerId;

use super::Event;

/// Whether the layers are read one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerOrder {
    /// Passes that read something of a layer.
    pub passes: u64,
    /// Passes that never go back to a lower layer than one that they have read.
    pub passes_in_order: u64,
    /// Steps from an access of a layer to the next access of another one, within a pass.
    pub steps: u64,
    /// Steps to the layer that comes next.
    pub steps_to_next: u64,
    /// Steps to a lower layer.
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
