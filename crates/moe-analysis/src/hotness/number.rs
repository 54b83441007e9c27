//! A number of the model that several traces may contain.

/// A number of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Number {
    /// As the trace or the model says.
    Stated(u32),
    /// As far as the trace shows: the model may have more. 0 if it does not show it.
    Seen(u32),
}

impl Number {
    pub fn get(self) -> u32 {
        match self {
            Number::Stated(n) | Number::Seen(n) => n,
        }
    }

    /// Raises what was only seen.
    pub fn raise_seen(&mut self, to: u32) {
        if let Number::Seen(n) = self {
            *n = to.max(*n);
        }
    }

    /// The number of a model of which both can be; `None` if there is no such model.
    pub fn merge(self, other: Number) -> Option<Number> {
        match (self, other) {
            (Number::Seen(a), Number::Seen(b)) => Some(Number::Seen(a.max(b))),
            (Number::Stated(a), Number::Stated(b)) => (a == b).then_some(self),
            (Number::Stated(stated), Number::Seen(seen))
            | (Number::Seen(seen), Number::Stated(stated)) => {
                (seen <= stated).then_some(Number::Stated(stated))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Number::{Seen, Stated};

    #[test]
    fn what_was_seen_is_a_lower_bound() {
        assert_eq!(Seen(2).merge(Seen(6)), Some(Seen(6)));
        assert_eq!(Seen(2).merge(Stated(8)), Some(Stated(8)));
        assert_eq!(Stated(8).merge(Seen(0)), Some(Stated(8)));
        assert_eq!(Stated(8).merge(Stated(8)), Some(Stated(8)));
        assert_eq!(Stated(8).merge(Seen(9)), None);
        assert_eq!(Stated(8).merge(Stated(4)), None);
    }
}
