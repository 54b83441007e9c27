//! Integers in bodies.

use std::fmt::{self, Display};
use std::ops::RangeInclusive;

use serde::Deserialize;
use serde::de::{Deserializer, Error, Unexpected, Visitor};

use super::error::ApiError;

/// An integer. As in JSON Schema, `1.0` is one. Integers that `i128` cannot represent saturate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Integer(pub(super) i128);

impl Integer {
    /// The integer as `T`.
    ///
    /// # Errors
    /// It is out of range.
    pub(super) fn in_range<T>(self, param: &str, range: RangeInclusive<T>) -> Result<T, ApiError>
    where
        T: TryFrom<i128> + PartialOrd + Display,
    {
        let value = T::try_from(self.0).ok();
        let value = value.filter(|value| range.contains(value));
        value.ok_or_else(|| {
            let (number, (min, max)) = (self.0, range.into_inner());
            let message = format!("{param}: {number} is out of range ({min}..={max})");
            ApiError::param(param, message)
        })
    }

    /// The integer as a maximum: 0 if it is negative, [`usize::MAX`] if it is larger.
    pub(super) fn as_limit(self) -> usize {
        usize::try_from(self.0.max(0)).unwrap_or(usize::MAX)
    }
}

impl<'de> Deserialize<'de> for Integer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Integer, D::Error> {
        deserializer.deserialize_any(IntegerVisitor)
    }
}

/// An integer that `T` can represent.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "Integer", bound = "T: TryFrom<i128>, T::Error: Display")]
pub(super) struct Int<T>(pub(super) T);

impl<T: TryFrom<i128>> TryFrom<Integer> for Int<T> {
    type Error = T::Error;

    fn try_from(integer: Integer) -> Result<Int<T>, T::Error> {
        T::try_from(integer.0).map(Int)
    }
}

struct IntegerVisitor;

impl Visitor<'_> for IntegerVisitor {
    type Value = Integer;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an integer")
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Integer, E> {
        Ok(Integer(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Integer, E> {
        Ok(Integer(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Integer, E> {
        if value.fract() == 0.0 {
            Ok(Integer(value as i128))
        } else {
            Err(E::invalid_type(Unexpected::Float(value), &self))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Int, Integer};

    #[test]
    fn reads_integers_with_and_without_a_fraction_of_zero() {
        for (text, expected) in [
            ("0", 0),
            ("-7", -7),
            ("1.0", 1),
            ("-0.0", 0),
            ("2e3", 2000),
            ("18446744073709551615", u64::MAX.into()),
            ("18446744073709551616", 1 << 64),
            ("1e300", i128::MAX),
        ] {
            let integer: Integer = serde_json::from_str(text).unwrap();
            assert_eq!(integer.0, expected, "{text}");
        }
        for text in ["0.5", "1e-3", "\"1\"", "true", "null", "[1]", "{}"] {
            let error = serde_json::from_str::<Integer>(text).unwrap_err();
            assert!(error.to_string().contains("expected an integer"), "{error}");
        }
    }

    #[test]
    fn rejects_integers_that_the_type_cannot_represent() {
        assert_eq!(serde_json::from_str::<Int<u8>>("255.0").unwrap().0, 255);
        for text in ["256", "-1", "1e300"] {
            assert!(serde_json::from_str::<Int<u8>>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn limits_saturate() {
        for (value, expected) in [(-3, 0), (5, 5), (i128::MAX, usize::MAX)] {
            assert_eq!(Integer(value).as_limit(), expected);
        }
    }
}
