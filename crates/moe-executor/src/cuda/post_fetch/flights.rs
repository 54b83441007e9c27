//! The down matrices of one layer, from the choice to the product.

use std::ops::Range;

use super::{Observer, Reason, State, Transfer};
use crate::cuda::{Event, Ptr, Result};

/// The down matrix of one chosen expert.
struct Flight {
    expert: i32,
    to: Ptr,
    state: State,
    /// The event after its transfer; unset if it has no place on the GPU.
    arrived: Option<Event>,
}

/// The down matrices of the layer that is under way, by index in the order in which their experts were chosen.
#[derive(Default)]
pub(super) struct Flights {
    layer: usize,
    all: Vec<Flight>,
    /// Told of every transfer.
    pub observer: Option<Observer>,
}

impl Flights {
    /// Forgets the layer before, and leaves each of the experts `ids` that `layer` chose to the host.
    pub(super) fn choose(&mut self, layer: usize, ids: &[i32]) {
        self.layer = layer;
        self.all.clear();
        for &expert in ids {
            if !self.all.iter().any(|flight| flight.expert == expert) {
                self.all.push(Flight {
                    expert,
                    to: Ptr::NULL,
                    state: State::CpuOnly,
                    arrived: None,
                });
            }
        }
    }

    /// Distinct experts.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Gives one a place on the GPU and the event after its transfer. Gives its expert.
    pub(super) fn plan(&mut self, at: usize, to: Ptr, arrived: Event) -> i32 {
        let flight = &mut self.all[at];
        (flight.to, flight.arrived) = (to, Some(arrived));
        flight.expert
    }

    /// Some travel, or are about to.
    pub(super) fn depart(&mut self, which: Range<usize>) {
        which.for_each(|at| self.come_to(at, State::CopyInFlight, None));
    }

    /// Some do not travel: the host computes them.
    pub(super) fn stay(&mut self, which: Range<usize>, reason: Reason) {
        which.for_each(|at| self.come_to(at, State::CpuOnly, Some(reason)));
    }

    /// Those that travel are there if `is_there` says so of the event after their transfer, or else late.
    ///
    /// # Errors
    /// What `is_there` gives; the host computes that one and those behind it.
    pub(super) fn land(&mut self, is_there: impl Fn(Event) -> Result<bool>) -> Result<()> {
        for at in 0..self.all.len() {
            if let (State::CopyInFlight, Some(arrived)) = (self.all[at].state, self.all[at].arrived)
            {
                match is_there(arrived) {
                    Ok(true) => self.come_to(at, State::GpuReady, None),
                    Ok(false) => self.come_to(at, State::CpuOnly, Some(Reason::Late)),
                    Err(error) => {
                        let travels = |at: &usize| self.all[*at].state == State::CopyInFlight;
                        let rest: Vec<usize> = (at..self.all.len()).filter(travels).collect();
                        for at in rest {
                            self.come_to(at, State::CpuOnly, Some(Reason::Failed));
                        }
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Those that are there.
    pub(super) fn n_there(&self) -> usize {
        let there = |flight: &&Flight| flight.state == State::GpuReady;
        self.all.iter().filter(there).count()
    }

    /// Where the matrix of an expert lies on the GPU; [`Ptr::NULL`] where the host computes.
    pub(super) fn place(&self, expert: i32) -> Ptr {
        let is_there =
            |flight: &&Flight| flight.expert == expert && flight.state == State::GpuReady;
        let flight = self.all.iter().find(is_there);
        flight.map_or(Ptr::NULL, |flight| flight.to)
    }

    fn come_to(&mut self, at: usize, state: State, reason: Option<Reason>) {
        let flight = &mut self.all[at];
        flight.state = state;
        if let Some(observer) = &mut self.observer {
            observer(Transfer {
                layer: self.layer,
                expert: flight.expert,
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

    /// Layer 3 with experts 7, 2 and 9 on their way to 100, 200 and 300, and what is told of them.
    fn travelling() -> (Flights, Rc<RefCell<Vec<String>>>) {
        let events = Rc::new(RefCell::new(Vec::new()));
        let seen = events.clone();
        let mut flights = Flights {
            observer: Some(Box::new(move |transfer| {
                seen.borrow_mut().push(transfer.to_string());
            })),
            ..Flights::default()
        };
        flights.choose(3, &[7, 2, 7, 9, 4]);
        for at in 0..3 {
            let expert = flights.plan(at, Ptr(100 * (at as u64 + 1)), Event(at));
            assert_eq!(expert, [7, 2, 9][at]);
        }
        flights.depart(0..3);
        (flights, events)
    }

    #[test]
    fn one_arrives_one_is_late_one_never_began() {
        let (mut flights, events) = travelling();
        assert_eq!(flights.len(), 4);
        assert_eq!(
            flights.place(7),
            Ptr::NULL,
            "nothing is there before it has landed"
        );
        flights.stay(2..3, Reason::NotStarted);
        flights.land(|event| Ok(event == Event(1))).unwrap();
        let places = [7, 2, 9, 4, 5].map(|expert| flights.place(expert).0);
        assert_eq!(places, [0, 200, 0, 0, 0]);
        assert_eq!(flights.n_there(), 1);
        assert_eq!(
            *events.borrow(),
            [
                "layer 3 expert 7 is to travel",
                "layer 3 expert 2 is to travel",
                "layer 3 expert 9 is to travel",
                "layer 3 expert 9 did not begin to travel",
                "layer 3 expert 7 is late",
                "layer 3 expert 2 is there",
            ]
        );
    }

    #[test]
    fn an_error_leaves_the_rest_to_the_host() {
        let (mut flights, events) = travelling();
        let outcome = flights.land(|event| match event {
            Event(0) => Ok(true),
            _ => Err(Error::NoDevice),
        });
        assert!(matches!(outcome, Err(Error::NoDevice)));
        assert_eq!(flights.n_there(), 1);
        let rest = [
            "layer 3 expert 7 is there",
            "layer 3 expert 2 failed on the way",
            "layer 3 expert 9 failed on the way",
        ];
        assert_eq!(events.borrow()[3..], rest);
    }

    #[test]
    fn the_next_layer_knows_nothing_of_the_last() {
        let (mut flights, _) = travelling();
        flights.land(|_| Ok(true)).unwrap();
        assert_eq!(flights.n_there(), 3);
        flights.choose(4, &[7, 7]);
        assert_eq!((flights.len(), flights.n_there()), (1, 0));
        assert_eq!(flights.place(7), Ptr::NULL);
    }
}
