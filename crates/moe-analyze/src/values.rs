//! Numbers on the command line, and what is said where something else is given.

use std::error::Error;
use std::fmt::Display;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Reads a whole number of a range. Its type is that of the option, which nothing but a run of the program checks.
pub fn whole<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: FromStr + PartialOrd + Display + Clone,
{
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        let (least, most) = (range.start(), range.end());
        number.ok_or_else(|| format!("give a whole number from {least} to {most}"))
    }
}

/// Reads a whole number that is not less than another.
pub fn at_least<T>(least: T) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: FromStr + PartialOrd + Display + Clone,
{
    move |text| {
        let number = text.parse().ok().filter(|number| *number >= least);
        number.ok_or_else(|| format!("give a whole number from {least} on"))
    }
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
        _ => "give a whole number from 0 on",
    })
}
