//! Numbers and ranges of numbers in the syntax of llama-bench.

use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::option_values::{ValueError, at_least};

/// Maximum length of a range. Each number is a test.
const MAX_NUMBERS: usize = 1024;

/// Why a text is not a range of numbers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NumbersError {
    /// A part of the text is not a number.
    #[error("{text:?} is not a number; {source}")]
    NotANumber {
        /// The part.
        text: String,
        /// The expected text.
        source: ValueError,
    },
    /// A number is out of range.
    #[error("{n} is out of range ({least}..={most})")]
    OutOfRange {
        /// The number.
        n: usize,
        /// Smallest valid number.
        least: usize,
        /// Largest valid number.
        most: usize,
    },
    /// The end is below the start.
    #[error("the end of the range, {last}, is below its start")]
    Descending {
        /// The end.
        last: usize,
    },
    /// Too many numbers.
    #[error("the range has more than {MAX_NUMBERS} numbers")]
    TooMany,
    /// A step of 0, or a factor that does not increase the number.
    #[error("the range does not advance from {n}; use a step above 0 or a factor above 1")]
    DoesNotGrow {
        /// The number.
        n: usize,
    },
}

/// The numbers of `N`, `FIRST-LAST`, `FIRST-LAST+STEP` or `FIRST-LAST*FACTOR`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbers(pub Vec<usize>);

impl Numbers {
    /// Returns the numbers of several ranges.
    pub fn of(ranges: &[Numbers]) -> impl Iterator<Item = usize> {
        ranges.iter().flat_map(|range| range.0.iter().copied())
    }

    /// Parses numbers within bounds.
    pub fn within(text: &str, bounds: RangeInclusive<usize>) -> Result<Numbers, NumbersError> {
        let numbers: Numbers = text.parse()?;
        match numbers.0.iter().find(|n| !bounds.contains(n)) {
            Some(&n) => Err(NumbersError::OutOfRange {
                n,
                least: *bounds.start(),
                most: *bounds.end(),
            }),
            None => Ok(numbers),
        }
    }
}

impl FromStr for Numbers {
    type Err = NumbersError;

    fn from_str(text: &str) -> Result<Numbers, NumbersError> {
        let number = |text: &str| {
            at_least(0)(text).map_err(|source| NumbersError::NotANumber {
                text: text.to_owned(),
                source,
            })
        };
        let Some((first, rest)) = text.split_once('-') else {
            return Ok(Numbers(vec![number(text)?]));
        };
        let (last, is_factor, step) = match rest.split_once(['+', '*']) {
            Some((last, step)) => (last, rest[last.len()..].starts_with('*'), number(step)?),
            None => (rest, false, 1),
        };
        let (first, last) = (number(first)?, number(last)?);
        if last < first {
            return Err(NumbersError::Descending { last });
        }
        let mut numbers = Vec::new();
        let mut next = Some(first);
        while let Some(n) = next.filter(|&n| n <= last) {
            if numbers.len() == MAX_NUMBERS {
                return Err(NumbersError::TooMany);
            }
            numbers.push(n);
            next = if is_factor {
                n.checked_mul(step)
            } else {
                n.checked_add(step)
            };
            if next.is_some_and(|next| next <= n) {
                return Err(NumbersError::DoesNotGrow { n });
            }
        }
        Ok(Numbers(numbers))
    }
}

#[cfg(test)]
mod tests {
    use super::Numbers;

    #[test]
    fn parses_the_ranges_of_llama_bench() {
        for (text, expected) in [
            ("512", &[512][..]),
            ("0", &[0]),
            ("4-4", &[4]),
            ("1-4", &[1, 2, 3, 4]),
            ("0-10+4", &[0, 4, 8]),
            ("1-8*2", &[1, 2, 4, 8]),
            ("3-30*3", &[3, 9, 27]),
            (
                "18446744073709551614-18446744073709551615*2",
                &[18446744073709551614],
            ),
        ] {
            assert_eq!(text.parse(), Ok(Numbers(expected.to_vec())), "{text}");
        }
    }

    #[test]
    fn rejects_invalid_ranges() {
        for (text, reason) in [
            ("", "is not a number"),
            ("x", "is not a number"),
            ("-2", "is not a number"),
            ("1-", "is not a number"),
            ("1-2-3", "is not a number"),
            ("1-8+", "is not a number"),
            ("4-1", "the end of the range, 1, is below its start"),
            ("0-8*2", "the range does not advance from 0"),
            ("1-8*1", "the range does not advance from 1"),
            ("1-8+0", "the range does not advance from 1"),
            ("1-9999999", "more than 1024 numbers"),
        ] {
            let error = text.parse::<Numbers>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
        assert_eq!(
            Numbers::within("1020-1030", 1..=1024)
                .unwrap_err()
                .to_string(),
            "1025 is out of range (1..=1024)"
        );
        assert!(Numbers::within("1-1024", 1..=1024).is_ok());
    }
}
