//! Parsers for the values of options, and their errors.

use std::error::Error;
use std::fmt::Display;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Why the value of an option is rejected. The command line's error contains the option and the value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// The value has another format.
    #[error("expected {0}")]
    Expected(&'static str),
    /// The value is not an integer of the range.
    #[error("{problem} ({least}..={most})")]
    OutOfRange {
        /// `not an integer`, or `out of range`.
        problem: &'static str,
        /// Smallest valid value.
        least: String,
        /// Largest valid value.
        most: String,
    },
    /// The value is not an integer, or is too small.
    #[error("expected an integer of at least {least}")]
    TooSmall {
        /// Smallest valid value.
        least: String,
    },
    /// The range has too many values.
    #[error("the range has {limit} values or more; use a larger step")]
    LongRange {
        /// First number of values that is too large.
        limit: usize,
    },
    /// The range is empty, or doubles from 0.
    #[error("a range must ascend, and start above 0 if it doubles")]
    BadRange,
    /// The range never reaches its end.
    #[error("the step of a range must be above 0")]
    ZeroStep,
}

const OUT_OF_RANGE: &str = "out of range";

/// Returns a parser for integers in `range`.
pub fn integer_in<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, ValueError> + Clone
where
    T: FromStr + PartialOrd + Display + Clone,
{
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| ValueError::OutOfRange {
            problem: if text.parse::<i128>().is_ok() {
                OUT_OF_RANGE
            } else {
                "not an integer"
            },
            least: range.start().to_string(),
            most: range.end().to_string(),
        })
    }
}

/// An integer type of option values.
pub trait Integer: FromStr<Err = ParseIntError> + PartialOrd + Display + Clone {
    /// Largest value.
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

/// Returns a parser for integers of at least `least`. The error names the upper bound only if the value exceeds it.
pub fn at_least<T: Integer>(least: T) -> impl Fn(&str) -> Result<T, ValueError> + Clone {
    move |text| match text.parse() {
        Ok(number) if number >= least => Ok(number),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Err(ValueError::OutOfRange {
            problem: OUT_OF_RANGE,
            least: least.to_string(),
            most: T::MAX.to_string(),
        }),
        _ => Err(ValueError::TooSmall {
            least: least.to_string(),
        }),
    }
}

/// Parses a value that satisfies `is_valid`. `expected` describes the valid values in the error.
pub fn number<T: FromStr>(
    text: &str,
    expected: &'static str,
    is_valid: impl Fn(&T) -> bool,
) -> Result<T, ValueError> {
    let number = text.parse().ok().filter(is_valid);
    number.ok_or(ValueError::Expected(expected))
}

/// Returns what an option of the standard library's number types expects, to replace the text of the standard library's error.
pub fn expected_number(error: &(dyn Error + 'static)) -> Option<&'static str> {
    if error.is::<ParseFloatError>() {
        return Some("expected a number");
    }
    let error: &ParseIntError = error.downcast_ref()?;
    Some(match error.kind() {
        IntErrorKind::PosOverflow => "the number is too large",
        _ => "expected an integer of at least 0",
    })
}

/// Parses a number above 0.
pub fn positive(text: &str) -> Result<f64, ValueError> {
    number(text, "a number above 0, at most 1e9", |value| {
        (1e-9..=1e9).contains(value)
    })
}

/// Parses a number of at least 0.
pub fn not_negative(text: &str) -> Result<f64, ValueError> {
    number(text, "a number from 0 to 1e9", |value| {
        (0.0..=1e9).contains(value)
    })
}

/// Parses 0 or 1.
pub fn switch(text: &str) -> Result<bool, ValueError> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(ValueError::Expected("0 or 1")),
    }
}

/// Returns the name of the first option that is present on the command line.
pub fn first_given<const N: usize>(options: [(&'static str, bool); N]) -> Option<&'static str> {
    let mut given = options.into_iter().filter(|(_, is_given)| *is_given);
    given.next().map(|(name, _)| name)
}
