//! A number of experts that several traces may contain.

/// A number of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Number {
    /// Stated by the trace or the model.
    Stated(u32),
    /// Lower bound from the contents of the trace; 0 if it contains no evidence.
    Seen(u32),
}

impl Number {
    pub fn get(self) -> u32 {
        match self {
            Number::Stated(n) | Number::Seen(n) => n,
        }
    }

    /// Raises a lower bound.
    pub fn raise_seen(&mut self, to: u32) {
        if let Number::Seen(n) = self {
            *n = to.max(*n);
        }
    }

    /// The number in a model that matches both; `None` if they contradict each other.
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
    fn seen_number_is_lower_bound() {
        assert_eq!(Seen(2).merge(Seen(6)), Some(Seen(6)));
        assert_eq!(Seen(2).merge(Stated(8)), Some(Stated(8)));
        assert_eq!(Stated(8).merge(Seen(0)), Some(Stated(8)));
        assert_eq!(Stated(8).merge(Stated(8)), Some(Stated(8)));
        assert_eq!(Stated(8).merge(Seen(9)), None);
        assert_eq!(Stated(8).merge(Stated(4)), None);
    }
}
