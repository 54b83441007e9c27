//! The transfers of one layer, from the routing decision to the product.

use std::ops::Range;

use super::{Observer, Reason, State, Transfer};
use crate::cuda::{Event, Ptr, Result};

/// The H2D copy of the down matrix of one selected expert.
struct ExpertCopy {
    expert: i32,
    /// Destination in the scratchpad.
    to: Ptr,
    state: State,
    /// The event after the copy; unset if it has no destination.
    end: Option<Event>,
}

/// The copies of the current layer, one for each distinct expert, in the order of the routing decisions.
#[derive(Default)]
pub(super) struct Copies {
    layer: usize,
    all: Vec<ExpertCopy>,
    /// Called at every change of state.
    pub observer: Option<Observer>,
}

impl Copies {
    /// Removes the copies of the previous layer. The experts `ids` that `layer` selects are left to the CPU so far.
    pub(super) fn start_layer(&mut self, layer: usize, ids: &[i32]) {
        self.layer = layer;
        self.all.clear();
        for &expert in ids {
            if !self.all.iter().any(|copy| copy.expert == expert) {
                self.all.push(ExpertCopy {
                    expert,
                    to: Ptr::NULL,
                    state: State::CpuOnly,
                    end: None,
                });
            }
        }
    }

    /// Number of distinct experts.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Sets the destination of a copy and the event after it. Returns its expert.
    pub(super) fn assign(&mut self, at: usize, to: Ptr, end: Event) -> i32 {
        let copy = &mut self.all[at];
        (copy.to, copy.end) = (to, Some(end));
        copy.expert
    }

    /// Notes that copies are queued: they are in flight, or start later.
    pub(super) fn queue(&mut self, which: Range<usize>) {
        which.for_each(|at| self.set_state(at, State::CopyInFlight, None));
    }

    /// Leaves experts to the CPU.
    pub(super) fn leave_to_cpu(&mut self, which: Range<usize>, reason: Reason) {
        which.for_each(|at| self.set_state(at, State::CpuOnly, Some(reason)));
    }

    /// Makes every queued copy ready if `is_complete` returns `true` for the event after it. Other experts are left to the CPU.
    ///
    /// # Errors
    /// Those of `is_complete`. Then the CPU computes that expert and all later ones.
    pub(super) fn finish(&mut self, is_complete: impl Fn(Event) -> Result<bool>) -> Result<()> {
        for at in 0..self.all.len() {
            if let (State::CopyInFlight, Some(end)) = (self.all[at].state, self.all[at].end) {
                match is_complete(end) {
                    Ok(true) => self.set_state(at, State::GpuReady, None),
                    Ok(false) => self.set_state(at, State::CpuOnly, Some(Reason::Missed)),
                    Err(error) => {
                        let is_queued = |at: &usize| self.all[*at].state == State::CopyInFlight;
                        let rest: Vec<usize> = (at..self.all.len()).filter(is_queued).collect();
                        for at in rest {
                            self.set_state(at, State::CpuOnly, Some(Reason::Failed));
                        }
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Number of experts whose matrix is ready on the GPU.
    pub(super) fn n_ready(&self) -> usize {
        let is_ready = |copy: &&ExpertCopy| copy.state == State::GpuReady;
        self.all.iter().filter(is_ready).count()
    }

    /// Address of the matrix of an expert on the GPU; [`Ptr::NULL`] if the CPU computes it.
    pub(super) fn address(&self, expert: i32) -> Ptr {
        let is_ready = |copy: &&ExpertCopy| copy.expert == expert && copy.state == State::GpuReady;
        let copy = self.all.iter().find(is_ready);
        copy.map_or(Ptr::NULL, |copy| copy.to)
    }

    fn set_state(&mut self, at: usize, state: State, reason: Option<Reason>) {
        let copy = &mut self.all[at];
        copy.state = state;
        if let Some(observer) = &mut self.observer {
            observer(Transfer {
                layer: self.layer,
                expert: copy.expert,
                state,
                reason,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::cuda::Error;

    /// Layer 3 with queued copies of experts 7, 2 and 9 to 100, 200 and 300, and the list of observed changes.
    fn queued() -> (Copies, Rc<RefCell<Vec<String>>>) {
        let events = Rc::new(RefCell::new(Vec::new()));
        let seen = events.clone();
        let mut copies = Copies {
            observer: Some(Box::new(move |transfer| {
                seen.borrow_mut().push(transfer.to_string());
            })),
            ..Copies::default()
        };
        copies.start_layer(3, &[7, 2, 7, 9, 4]);
        for at in 0..3 {
            let expert = copies.assign(at, Ptr(100 * (at as u64 + 1)), Event(at));
            assert_eq!(expert, [7, 2, 9][at]);
        }
        copies.queue(0..3);
        (copies, events)
    }

    #[test]
    fn copies_are_ready_missed_or_not_started() {
        let (mut copies, events) = queued();
        assert_eq!(copies.len(), 4);
        assert_eq!(
            copies.address(7),
            Ptr::NULL,
            "no matrix is ready before `finish`"
        );
        copies.leave_to_cpu(2..3, Reason::NotStarted);
        copies.finish(|event| Ok(event == Event(1))).unwrap();
        let addresses = [7, 2, 9, 4, 5].map(|expert| copies.address(expert).0);
        assert_eq!(addresses, [0, 200, 0, 0, 0]);
        assert_eq!(copies.n_ready(), 1);
        assert_eq!(
            *events.borrow(),
            [
                "layer 3 expert 7: copy queued",
                "layer 3 expert 2: copy queued",
                "layer 3 expert 9: copy queued",
                "layer 3 expert 9: copy not started, computed on the CPU",
                "layer 3 expert 7: missed (not ready in time), computed on the CPU",
                "layer 3 expert 2: ready on the GPU",
            ]
        );
    }

    #[test]
    fn error_leaves_later_experts_to_the_cpu() {
        let (mut copies, events) = queued();
        let outcome = copies.finish(|event| match event {
            Event(0) => Ok(true),
            _ => Err(Error::NoDevice),
        });
        assert!(matches!(outcome, Err(Error::NoDevice)));
        assert_eq!(copies.n_ready(), 1);
        let rest = [
            "layer 3 expert 7: ready on the GPU",
            "layer 3 expert 2: copy failed, computed on the CPU",
            "layer 3 expert 9: copy failed, computed on the CPU",
        ];
        assert_eq!(events.borrow()[3..], rest);
    }

    #[test]
    fn next_layer_starts_without_copies() {
        let (mut copies, _) = queued();
        copies.finish(|_| Ok(true)).unwrap();
        assert_eq!(copies.n_ready(), 3);
        copies.start_layer(4, &[7, 7]);
        assert_eq!((copies.len(), copies.n_ready()), (1, 0));
        assert_eq!(copies.address(7), Ptr::NULL);
    }
}
