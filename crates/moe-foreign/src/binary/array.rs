//! [`Array`]: a view of an n-dimensional array in the bytes of a file.

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ElementType {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F32,
    F64,
}

impl ElementType {
    /// Bytes of an element.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }
}

/// An element, widened to 64 bits.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Number {
    Int(i64),
    /// An integer above `i64::MAX`.
    Big(u64),
    Float(f64),
}

/// Above 2^53 a 64-bit float does not represent every integer.
const MAX_EXACT: u64 = 1 << 53;

/// Maximum number of dimensions. No format has more, and errors list all of them.
const MAX_DIMS: usize = 8;

/// Why bytes cannot be viewed as an array.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ArrayError {
    #[error("the array has {n} dimensions; the maximum is {MAX_DIMS}")]
    Dimensions { n: usize },
    #[error("the array has {n_dims} dimensions, but {n_strides} strides")]
    Strides { n_dims: usize, n_strides: usize },
    #[error("an array of shape {shape:?} does not fit in {n_bytes} bytes")]
    Size { shape: Vec<usize>, n_bytes: usize },
    #[error(
        "an array of shape {shape:?} with strides {strides:?} extends past the end of its {n_bytes} bytes"
    )]
    Reach {
        shape: Vec<usize>,
        strides: Vec<usize>,
        n_bytes: usize,
    },
    #[error(
        "elements of an array of shape {shape:?} with strides {strides:?} overlap, as in an expanded tensor"
    )]
    Overlap {
        shape: Vec<usize>,
        strides: Vec<usize>,
    },
}

/// A view of an array. All elements are inside `bytes`, and no two elements overlap.
#[derive(Clone, Debug)]
pub(crate) struct Array<'a> {
    /// Starts with the first element.
    bytes: &'a [u8],
    ty: ElementType,
    big_endian: bool,
    shape: Vec<usize>,
    /// In elements.
    strides: Vec<usize>,
}

impl<'a> Array<'a> {
    /// Returns a view of `bytes` as an array, with `strides` in elements. As in NumPy and PyTorch, the stride of a dimension of
    /// size 1 is ignored, and so are all strides of an empty array.
    ///
    /// Elements must be inside `bytes` and must not overlap. So the number of elements is bounded by the file size, whatever the
    /// header of the file claims. Strides that interleave dimensions are rejected too, even if no elements overlap, because no
    /// program writes them.
    ///
    /// # Errors
    /// [`ArrayError`] if shape and strides violate these rules.
    pub(crate) fn new(
        bytes: &'a [u8],
        ty: ElementType,
        big_endian: bool,
        shape: Vec<usize>,
        strides: Vec<usize>,
    ) -> Result<Self, ArrayError> {
        if shape.len() > MAX_DIMS {
            return Err(ArrayError::Dimensions { n: shape.len() });
        }
        if shape.len() != strides.len() {
            return Err(ArrayError::Strides {
                n_dims: shape.len(),
                n_strides: strides.len(),
            });
        }
        // Loops over the other dimensions of an empty array must end at once, whatever their sizes.
        let shape = if shape.contains(&0) {
            vec![0; shape.len()]
        } else {
            shape
        };
        let n_bytes = bytes.len();
        let held = n_bytes / ty.size();
        let n_elements = shape.iter().try_fold(1usize, |n, &ne| n.checked_mul(ne));
        if n_elements.is_none_or(|n| n > held) {
            return Err(ArrayError::Size { shape, n_bytes });
        }
        if !shape.contains(&0) {
            let mut dims: Vec<(usize, usize)> = (strides.iter().copied())
                .zip(shape.iter().copied())
                .filter(|&(_, ne)| ne > 1)
                .collect();
            dims.sort_unstable();
            // Index of the last element of the dimensions so far. The stride of the next dimension must exceed it.
            let mut last = Some(0usize);
            for (stride, ne) in dims {
                if last.is_some_and(|last| stride <= last) {
                    return Err(ArrayError::Overlap { shape, strides });
                }
                let reach = stride.checked_mul(ne - 1);
                last = last
                    .zip(reach)
                    .and_then(|(last, reach)| last.checked_add(reach));
            }
            if last.is_none_or(|last| last >= held) {
                return Err(ArrayError::Reach {
                    shape,
                    strides,
                    n_bytes,
                });
            }
        }
        Ok(Self {
            bytes,
            ty,
            big_endian,
            shape,
            strides,
        })
    }

    /// [`Array::new`] with contiguous elements: row-major (C order), or column-major (Fortran order).
    pub(crate) fn contiguous(
        bytes: &'a [u8],
        ty: ElementType,
        big_endian: bool,
        shape: Vec<usize>,
        fortran_order: bool,
    ) -> Result<Self, ArrayError> {
        let mut strides = vec![0; shape.len()];
        let mut stride = 1usize;
        for i in 0..shape.len() {
            let dim = if fortran_order {
                i
            } else {
                shape.len() - 1 - i
            };
            strides[dim] = stride;
            stride = stride.saturating_mul(shape[dim]);
        }
        Self::new(bytes, ty, big_endian, shape, strides)
    }

    /// Size of each dimension; all 0 if the array is empty.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn element_type(&self) -> ElementType {
        self.ty
    }

    /// The element at `index` (one number per dimension) if it is an integer, or a float with an integer value.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an integer of at most 53 bits"
    )]
    pub(crate) fn integer(&self, index: &[usize]) -> Option<i64> {
        match self.number(index)? {
            Number::Int(n) => Some(n),
            Number::Float(x) if x.fract() == 0.0 && x.abs() <= MAX_EXACT as f64 => Some(x as i64),
            Number::Big(_) | Number::Float(_) => None,
        }
    }

    /// Highest integer that [`Array::integer`] returns.
    pub(crate) fn max_integer(&self) -> u64 {
        if self.ty.is_float() {
            MAX_EXACT
        } else {
            i64::MAX.unsigned_abs()
        }
    }

    /// The element at `index` as text. Larger floats than [`MAX_EXACT`] have an exponent, because their last digits may differ from
    /// those in the file.
    pub(crate) fn shown(&self, index: &[usize]) -> Option<String> {
        Some(match self.number(index)? {
            Number::Int(n) => n.to_string(),
            Number::Big(n) => n.to_string(),
            Number::Float(x) if x.abs() > MAX_EXACT as f64 => format!("{x:e}"),
            Number::Float(x) => x.to_string(),
        })
    }

    fn number(&self, index: &[usize]) -> Option<Number> {
        if index.len() != self.shape.len() {
            return None;
        }
        let mut element = 0;
        for ((&i, &ne), &stride) in index.iter().zip(&self.shape).zip(&self.strides) {
            if i >= ne {
                return None;
            }
            element += i * stride; // cannot overflow: `new` checks the index of the last element
        }
        let size = self.ty.size();
        let mut bytes = [0; 8];
        let place = bytes.get_mut(..size)?;
        place.copy_from_slice(self.bytes.get(element * size..)?.get(..size)?);
        if self.big_endian {
            place.reverse();
        }
        let low = u64::from_le_bytes(bytes);
        Some(match self.ty {
            ElementType::Bool | ElementType::U8 | ElementType::U16 | ElementType::U32 => {
                Number::Int(low as i64)
            }
            ElementType::I8 => Number::Int(((low & 0xFF) as i8).into()),
            ElementType::I16 => Number::Int(((low & 0xFFFF) as i16).into()),
            ElementType::I32 => Number::Int(((low & 0xFFFF_FFFF) as i32).into()),
            ElementType::I64 => Number::Int(low as i64),
            ElementType::U64 => i64::try_from(low).map_or(Number::Big(low), Number::Int),
            ElementType::F32 => Number::Float(f32::from_bits((low & 0xFFFF_FFFF) as u32).into()),
            ElementType::F64 => Number::Float(f64::from_bits(low)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_locate_elements() {
        let bytes: Vec<u8> = (0u16..6).flat_map(u16::to_be_bytes).collect();
        let row_major =
            Array::contiguous(&bytes, ElementType::I16, true, vec![2, 3], false).unwrap();
        assert_eq!(row_major.integer(&[1, 0]), Some(3));
        let fortran = Array::contiguous(&bytes, ElementType::I16, true, vec![2, 3], true).unwrap();
        assert_eq!(fortran.integer(&[1, 0]), Some(1));
        assert_eq!(fortran.integer(&[1, 2]), Some(5));
        assert_eq!(fortran.integer(&[2, 0]), None);
        assert_eq!(fortran.integer(&[0]), None);
    }

    #[test]
    fn rejects_shapes_that_do_not_fit_in_the_bytes() {
        let bytes = [0; 24];
        let view = |shape: &[usize], strides: &[usize]| {
            Array::new(
                &bytes,
                ElementType::I32,
                false,
                shape.to_vec(),
                strides.to_vec(),
            )
        };
        assert!(view(&[2, 3], &[3, 1]).is_ok());
        assert!(
            view(&[2, 3], &[4, 1]).is_err(),
            "the last row extends past the end"
        );
        assert!(
            view(&[1 << 40, 1], &[0, 1]).is_err(),
            "one element repeated 2^40 times"
        );
        assert!(view(&[usize::MAX, 2], &[1, 1]).is_err());
        assert!(view(&[2, 2], &[usize::MAX, 1]).is_err());
        assert!(view(&[2], &[1, 1]).is_err());
        assert_eq!(
            view(&[1; 9], &[1; 9]).unwrap_err(),
            ArrayError::Dimensions { n: 9 }
        );
        let empty = view(&[usize::MAX, 0], &[1, 1]).unwrap();
        assert_eq!(empty.shape(), [0, 0], "loops over an empty array end");
    }

    #[test]
    fn rejects_overlapping_elements() {
        let bytes = [0; 24];
        let view = |shape: &[usize], strides: &[usize]| {
            let (shape, strides) = (shape.to_vec(), strides.to_vec());
            Array::new(&bytes, ElementType::I32, false, shape, strides).map(|_| ())
        };
        for (shape, strides) in [
            (&[3][..], &[0][..]),
            (&[2, 2], &[1, 1]),
            (&[2, 2], &[0, 1]),
            (&[2, 3], &[2, 1]),
            (&[3, 2], &[1, 2]),
            (&[2, 1, 2], &[1, 9, 1]),
        ] {
            let (shape, strides) = (shape.to_vec(), strides.to_vec());
            let error = view(&shape, &strides).unwrap_err();
            assert_eq!(error, ArrayError::Overlap { shape, strides });
        }
        // Valid: transposed, with gaps, and any stride for dimensions of size 0 or 1.
        for (shape, strides) in [
            (&[3, 2][..], &[1, 3][..]),
            (&[2, 2], &[4, 1]),
            (&[3], &[2]),
            (&[1], &[0]),
            (&[2, 1, 3], &[3, 0, 1]),
            (&[1, 2], &[usize::MAX, 5]),
            (&[0, 3], &[0, 0]),
            (&[], &[]),
        ] {
            view(shape, strides).unwrap();
        }
        assert!(view(&[4], &[2]).is_err(), "past the end");
    }

    #[test]
    fn integer_rejects_fractions_and_large_numbers() {
        let bytes: Vec<u8> = [2.0f64, 2.5, f64::NAN, 1e300]
            .into_iter()
            .flat_map(f64::to_le_bytes)
            .collect();
        let floats = Array::contiguous(&bytes, ElementType::F64, false, vec![4], false).unwrap();
        assert_eq!(floats.integer(&[0]), Some(2));
        assert!((1..4).all(|i| floats.integer(&[i]).is_none()));
        let shown = |array: &Array<'_>, i: usize| array.shown(&[i]).unwrap();
        let texts = [0, 1, 2, 3].map(|i| shown(&floats, i));
        assert_eq!(texts, ["2", "2.5", "NaN", "1e300"]);
        assert_eq!(floats.max_integer(), 9_007_199_254_740_992);
        let big = u64::MAX.to_le_bytes();
        let big = Array::contiguous(&big, ElementType::U64, false, vec![1], false).unwrap();
        assert_eq!(big.integer(&[0]), None);
        assert_eq!(shown(&big, 0), "18446744073709551615");
        assert_eq!(big.max_integer(), 9_223_372_036_854_775_807);
    }
}
