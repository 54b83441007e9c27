//! Arrays that JSON contains as nested lists: `[[1, 2], [3, 4]]`.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, SeqAccess, Visitor};
use zerocopy::IntoBytes;

use super::array::{Array, ArrayError, ElementType};

/// Maximum depth of the lists. Known formats have at most three.
const MAX_DIMS: usize = 4;

/// The numbers of nested lists, whose lengths must be equal at each depth.
#[derive(Debug)]
pub(crate) struct Nested {
    shape: Shape,
    numbers: Vec<f64>,
}

impl Nested {
    /// The numbers as an array of 64-bit floats. A single number is an array without dimensions.
    ///
    /// # Errors
    /// [`ArrayError`]; does not occur for lists that were parsed.
    pub(crate) fn array(&self) -> Result<Array<'_>, ArrayError> {
        Array::contiguous(
            self.numbers.as_bytes(),
            ElementType::F64,
            cfg!(target_endian = "big"),
            self.shape.sizes[..self.shape.n_dims].to_vec(),
            false,
        )
    }
}

impl<'de> Deserialize<'de> for Nested {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut numbers = Vec::new();
        let level = Level {
            numbers: &mut numbers,
            depth: 0,
        };
        let shape = level.deserialize(deserializer)?;
        Ok(Nested { shape, numbers })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Shape {
    sizes: [usize; MAX_DIMS],
    n_dims: usize,
}

/// The value inside `depth` lists: a number, or a list whose elements have the same shape.
struct Level<'a> {
    numbers: &'a mut Vec<f64>,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Level<'_> {
    type Value = Shape;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Shape, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Level<'_> {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("numbers in nested lists")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Shape, E> {
        self.visit_f64(number as f64)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Shape, E> {
        self.visit_f64(number as f64)
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Shape, E> {
        self.numbers.push(number);
        Ok(Shape::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
        if self.depth >= MAX_DIMS {
            let reason = format!("lists are nested more than {MAX_DIMS} deep");
            return Err(de::Error::custom(reason));
        }
        let mut length = 0;
        let mut inner = None;
        while let Some(shape) = list.next_element_seed(Level {
            numbers: self.numbers,
            depth: self.depth + 1,
        })? {
            if *inner.get_or_insert(shape) != shape {
                return Err(de::Error::custom(
                    "elements of a list have different lengths",
                ));
            }
            length += 1;
        }
        let inner = inner.unwrap_or_default();
        let mut shape = Shape {
            n_dims: inner.n_dims + 1,
            ..Shape::default()
        };
        for (size, known) in shape
            .sizes
            .iter_mut()
            .zip(std::iter::once(length).chain(inner.sizes))
        {
            *size = known;
        }
        Ok(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Nested, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn reads_lists_of_equal_shape_as_an_array() {
        let nested = read("[[[1, 2], [3, -4]], [[5, 6], [7, 8.0]], [[0, 0], [0, 9]]]").unwrap();
        let array = nested.array().unwrap();
        assert_eq!(array.shape(), [3, 2, 2]);
        assert_eq!(array.integer(&[0, 1, 1]), Some(-4));
        assert_eq!(array.integer(&[2, 1, 1]), Some(9));
        assert_eq!(read("[[], []]").unwrap().array().unwrap().shape(), [0, 0]);
        assert_eq!(read("7").unwrap().array().unwrap().shape(), [0usize; 0]);
    }

    #[test]
    fn rejects_ragged_lists() {
        for text in [
            "[[1, 2], [3]]",
            "[1, [2]]",
            "[[1], 2]",
            "[[1], [[2]]]",
            "[[], [1]]",
        ] {
            assert!(
                read(text).unwrap_err().contains("different lengths"),
                "{text}"
            );
        }
        assert!(read("[[[[[1]]]]]").unwrap_err().contains("deep"));
        assert!(read("[\"1\"]").is_err());
        assert!(read("[null]").is_err());
    }
}
