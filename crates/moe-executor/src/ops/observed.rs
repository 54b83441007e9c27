//! The observer of a batch. It gets the routing when the pass has ended, so that nothing waits for it.

use moe_engine::{Observer, RouterOutput, TokenSequence};
use moe_trace::LayerId;

use super::Ops;
use crate::cuda::Download;
use crate::error::Result;
use crate::recorder::Routing;

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
    selected: Selected,
}

/// Selected experts and their weights.
enum Selected {
    Here(Vec<i32>, Vec<f32>),
    /// In a D2H copy, which ends with the pass.
    InFlight(Download),
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
        let selected = match routing.copy {
            Some(copy) => Selected::InFlight(copy),
            None => {
                self.routing_to_host(routing);
                Selected::Here(routing.ids.host().to_vec(), routing.weights.host().to_vec())
            }
        };
        self.batch_observer.pending.push(Pending {
            layer,
            positions: self.positions.clone(),
            sequences: self.sequences.clone(),
            n_expert_used: routing.n_expert_used,
            selected,
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
            let (ids, weights) = match &routing.selected {
                Selected::Here(ids, weights) => (ids.as_slice(), weights.as_slice()),
                Selected::InFlight(copy) => self.devices.downloaded(copy)?,
            };
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
