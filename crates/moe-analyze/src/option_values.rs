//! Parsers for the values of options, and their errors.

use std::error::Error;
use std::fmt::Display;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Why the value of an option is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// It is not what the option takes.
    #[error("give {0}")]
    Expected(&'static str),
    /// It is not an integer, or is out of range.
    #[error("give an integer from {least} to {most}")]
    OutOfRange {
        /// Least value.
        least: String,
        /// Greatest value.
        most: String,
    },
    /// It is not an integer, or is too small.
    #[error("give an integer of at least {least}")]
    TooSmall {
        /// Least value.
        least: String,
    },
    /// It stands for more values than are taken.
    #[error("the range has {limit} values or more; give a larger step")]
    LongRange {
        /// Values that are too many.
        limit: usize,
    },
    /// It is a range of numbers that makes no sense.
    #[error("a range goes up, and starts above 0 if it doubles")]
    BadRange,
}

/// Reads an integer of a range. Its type is that of the option, which nothing but a run of the program checks.
pub fn whole<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, ValueError> + Clone
where
    T: FromStr + PartialOrd + Display + Clone,
{
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| ValueError::OutOfRange {
            least: range.start().to_string(),
            most: range.end().to_string(),
        })
    }
}

/// A type of integers.
pub trait Integer: FromStr<Err = ParseIntError> + PartialOrd + Display + Clone {
    /// The greatest one.
    const MAX: Self;
}

macro_rules! integers {
    ($($type:ty),+) => {$(
        impl Integer for $type {
            const MAX: Self = <$type>::MAX;
        }
    )+};
}
integers!(u32, u64, usize);

/// Reads an integer that is not less than another. The message names the upper end of the range only for a number above it.
pub fn at_least<T: Integer>(least: T) -> impl Fn(&str) -> Result<T, ValueError> + Clone {
    move |text| match text.parse() {
        Ok(number) if number >= least => Ok(number),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Err(ValueError::OutOfRange {
            least: least.to_string(),
            most: T::MAX.to_string(),
        }),
        _ => Err(ValueError::TooSmall {
            least: least.to_string(),
        }),
    }
}

/// Reads a number for which `is_valid` holds; `expected` says what the option takes.
pub fn number<T: FromStr>(
    text: &str,
    expected: &'static str,
    is_valid: impl Fn(&T) -> bool,
) -> Result<T, ValueError> {
    let number = text.parse().ok().filter(is_valid);
    number.ok_or(ValueError::Expected(expected))
}

/// What an option wants that takes every number of its type, in the place of the standard library's words for what it
/// got; no whole number that an option takes is below 0.
pub fn wanted(error: &(dyn Error + 'static)) -> Option<&'static str> {
    if error.is::<ParseFloatError>() {
        return Some("give a number");
    }
    let error: &ParseIntError = error.downcast_ref()?;
    Some(match error.kind() {
        IntErrorKind::PosOverflow => "the number is too large",
        _ => "give an integer of at least 0",
    })
}

/// A number for an option that takes no 0.
pub fn positive(text: &str) -> Result<f64, ValueError> {
    number(text, "a number above 0, up to 1e9", |value| {
        (1e-9..=1e9).contains(value)
    })
}

/// A number for an option that takes 0, too.
pub fn not_negative(text: &str) -> Result<f64, ValueError> {
    number(text, "a number from 0 to 1e9", |value| {
        (0.0..=1e9).contains(value)
    })
}

/// The name of the first option that was given.
pub fn first_given<const N: usize>(options: [(&'static str, bool); N]) -> Option<&'static str> {
    let mut given = options.into_iter().filter(|(_, is_given)| *is_given);
    given.next().map(|(name, _)| name)
}
