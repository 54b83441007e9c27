//! The observer of a batch. It gets the routing when the pass has ended, so that nothing waits for it.

use moe_engine::{Observer, RouterOutput, TokenSequence};
use moe_trace::LayerId;

use super::Ops;
use crate::error::Result;
use crate::recorder::{Routing, SelectedExperts};

/// An observer, and the routing of the current pass.
#[derive(Default)]
pub struct BatchObserver<'a> {
    observer: Option<Observer<'a>>,
    pending: Vec<Pending>,
}

/// The routing of a layer.
struct Pending {
    layer: LayerId,
    positions: Vec<u32>,
    sequences: Vec<TokenSequence>,
    n_expert_used: usize,
    selected: SelectedExperts,
}

impl<'a> BatchObserver<'a> {
    /// Calls `observer` from the next pass on; `None`: no observer.
    pub fn set(&mut self, observer: Option<Observer<'a>>) {
        self.observer = observer;
        self.pending.clear();
    }

    /// Whether the routing is observed.
    pub fn is_on(&self) -> bool {
        self.observer.is_some()
    }

    /// Removes the routing of a pass that failed.
    pub fn begin_pass(&mut self) {
        self.pending.clear();
    }
}

impl Ops<'_> {
    /// Notes the routing of a layer for the observer of the batch.
    pub(super) fn note_routing(&mut self, layer: LayerId, routing: &mut Routing) {
        if !self.batch_observer.is_on() {
            return;
        }
        if routing.copy.is_none() {
            self.routing_to_host(routing);
        }
        self.batch_observer.pending.push(Pending {
            layer,
            positions: self.positions.clone(),
            sequences: self.sequences.clone(),
            n_expert_used: routing.n_expert_used,
            selected: SelectedExperts::new(routing),
        });
    }

    /// Reports the routing of a pass that has ended to the observer of the batch.
    ///
    /// # Errors
    /// The pass has not ended.
    pub(super) fn report_routing(&mut self) -> Result<()> {
        let BatchObserver { observer, pending } = &mut self.batch_observer;
        let Some(observer) = observer else {
            return Ok(());
        };
        for routing in pending.drain(..) {
            let (ids, weights) = routing.selected.read(&self.devices)?;
            observer(&RouterOutput {
                layer: routing.layer,
                positions: &routing.positions,
                sequences: &routing.sequences,
                logits: &[],
                ids,
                weights,
                n_expert_used: routing.n_expert_used,
            });
        }
        Ok(())
    }
}
