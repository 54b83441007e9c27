//! `.npy` files of NumPy: a header as a Python literal, then the elements.
//!
//! Format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>

use super::array::{Array, ElementType};
use super::error::BinaryError;

/// First bytes of a file.
pub(crate) const MAGIC: &[u8] = b"\x93NUMPY";
/// Maximum header length in bytes; the default limit of NumPy.
const MAX_HEADER: usize = 10_000;
/// Alignment of the elements in files that NumPy writes, in bytes.
const ALIGNMENT: usize = 64;

/// Returns a view of the array in a `.npy` file of version 1, 2 or 3.
pub(crate) fn read(bytes: &[u8]) -> Result<Array<'_>, BinaryError> {
    if !bytes.starts_with(MAGIC) {
        return Err(BinaryError::at(
            0,
            "not a .npy file: it does not start with \\x93NUMPY",
        ));
    }
    let (length, start) = match bytes.get(6) {
        Some(1) => (le(bytes, 8, 2), 10),
        Some(2 | 3) => (le(bytes, 8, 4), 12),
        Some(version) => {
            return Err(BinaryError::at(
                6,
                format!(
                    "version {version} of the .npy format is not supported (supported: 1 to 3); save the array with numpy.save"
                ),
            ));
        }
        None => (None, 6),
    };
    let header = length
        .filter(|&length| length <= MAX_HEADER)
        .and_then(|length| bytes.get(start..)?.get(..length));
    let Some(header) = header else {
        return Err(BinaryError::at(
            8,
            "the header is truncated or longer than 10,000 bytes; save the array again",
        ));
    };
    let header =
        Header::parse(header).map_err(|(at, reason)| BinaryError::at(start + at, reason))?;
    let data = start + length.unwrap_or(0);
    Array::contiguous(
        &bytes[data..],
        header.ty,
        header.big_endian,
        header.shape,
        header.fortran_order,
    )
    .map_err(|error| BinaryError::at(data, format!("{error}; the file is damaged or truncated")))
}

/// The magic and header of a little-endian array in C order, as NumPy writes them.
pub(crate) fn header(ty: ElementType, shape: &[usize]) -> Vec<u8> {
    let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
    let comma = if shape.len() == 1 { "," } else { "" };
    let text = format!(
        "{{'descr': '{}', 'fortran_order': False, 'shape': ({}{comma}), }}",
        descr(ty),
        sizes.join(", ")
    );
    let before = MAGIC.len() + 2 + 2;
    let padded = (before + text.len() + 1).next_multiple_of(ALIGNMENT) - before;
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    let n_header = u16::try_from(padded).expect("a header has a few numbers");
    bytes.extend(n_header.to_le_bytes());
    bytes.extend(text.as_bytes());
    bytes.resize(before + padded - 1, b' ');
    bytes.push(b'\n');
    bytes
}

/// The header of a `.npy` file with unsigned 64-bit integers, little-endian, in C order.
pub fn npy_header_u64(shape: &[usize]) -> Vec<u8> {
    header(ElementType::U64, shape)
}

/// The header of a `.npy` file with 64-bit floats, little-endian, in C order.
pub fn npy_header_f64(shape: &[usize]) -> Vec<u8> {
    header(ElementType::F64, shape)
}

fn descr(ty: ElementType) -> &'static str {
    match ty {
        ElementType::Bool => "|b1",
        ElementType::U8 => "|u1",
        ElementType::I8 => "|i1",
        ElementType::U16 => "<u2",
        ElementType::I16 => "<i2",
        ElementType::U32 => "<u4",
        ElementType::I32 => "<i4",
        ElementType::U64 => "<u8",
        ElementType::I64 => "<i8",
        ElementType::F32 => "<f4",
        ElementType::F64 => "<f8",
    }
}

fn le(bytes: &[u8], at: usize, size: usize) -> Option<usize> {
    let mut word = [0; 4];
    word.get_mut(..size)?
        .copy_from_slice(bytes.get(at..)?.get(..size)?);
    usize::try_from(u32::from_le_bytes(word)).ok()
}

struct Header {
    ty: ElementType,
    big_endian: bool,
    fortran_order: bool,
    shape: Vec<usize>,
}

impl Header {
    /// Parses `{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }` with the keys in any order.
    fn parse(text: &[u8]) -> Result<Self, (usize, String)> {
        let mut literal = Literal { text, at: 0 };
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        literal.expect(b'{')?;
        while !literal.take(b'}') {
            let key = literal.string()?;
            literal.expect(b':')?;
            match key {
                b"descr" => descr = Some((literal.at, literal.string()?)),
                b"fortran_order" => fortran_order = Some(literal.boolean()?),
                b"shape" => shape = Some(literal.tuple()?),
                _ => {
                    return Err(literal.error("unknown key: not descr, fortran_order or shape"));
                }
            }
            if !literal.take(b',') {
                literal.expect(b'}')?;
                break;
            }
        }
        let (Some((at, descr)), Some(fortran_order), Some(shape)) = (descr, fortran_order, shape)
        else {
            return Err(literal.error("descr, fortran_order or shape is missing"));
        };
        let (big_endian, ty) = element_type(descr).ok_or_else(|| {
            let descr = String::from_utf8_lossy(descr);
            (
                at,
                format!(
                    "element type {descr:?} is not supported; convert the array to integers or floats with astype"
                ),
            )
        })?;
        Ok(Self {
            ty,
            big_endian,
            fortran_order,
            shape,
        })
    }
}

/// Whether a type such as `<i4` (byte order, kind, size) is big-endian, and its element type.
fn element_type(descr: &[u8]) -> Option<(bool, ElementType)> {
    let (&order, kind) = descr.split_first()?;
    let big_endian = match order {
        b'<' | b'|' | b'=' => false,
        b'>' => true,
        _ => return None,
    };
    let ty = match kind {
        b"b1" => ElementType::Bool,
        b"u1" => ElementType::U8,
        b"i1" => ElementType::I8,
        b"u2" => ElementType::U16,
        b"i2" => ElementType::I16,
        b"u4" => ElementType::U32,
        b"i4" => ElementType::I32,
        b"u8" => ElementType::U64,
        b"i8" => ElementType::I64,
        b"f4" => ElementType::F32,
        b"f8" => ElementType::F64,
        _ => return None,
    };
    Some((big_endian, ty))
}

/// A parser for the Python literals in a header: dictionary, strings, booleans, tuple of integers.
struct Literal<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Literal<'a> {
    fn error(&self, reason: &str) -> (usize, String) {
        (
            self.at,
            format!("invalid .npy header: {reason}; save the array with numpy.save"),
        )
    }

    /// Skips white space; returns the rest of the text.
    fn rest(&mut self) -> &'a [u8] {
        let blank = |byte: &u8| byte.is_ascii_whitespace();
        let rest = self.text.get(self.at..).unwrap_or_default();
        self.at += rest.iter().take_while(|byte| blank(byte)).count();
        self.text.get(self.at..).unwrap_or_default()
    }

    fn take(&mut self, byte: u8) -> bool {
        let is_there = self.rest().first() == Some(&byte);
        self.at += usize::from(is_there);
        is_there
    }

    fn expect(&mut self, byte: u8) -> Result<(), (usize, String)> {
        if self.take(byte) {
            return Ok(());
        }
        Err(self.error(&format!("expected `{}`", byte as char)))
    }

    fn string(&mut self) -> Result<&'a [u8], (usize, String)> {
        let rest = self.rest();
        let Some((&quote @ (b'\'' | b'"'), text)) = rest.split_first() else {
            return Err(self.error("expected a string (structured arrays are not supported)"));
        };
        let Some(end) = text.iter().position(|&byte| byte == quote) else {
            return Err(self.error("a string has no closing quote"));
        };
        self.at += end + 2;
        Ok(&text[..end])
    }

    fn boolean(&mut self) -> Result<bool, (usize, String)> {
        let rest = self.rest();
        for (word, value) in [(&b"True"[..], true), (b"False", false)] {
            if rest.starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self.error("expected True or False"))
    }

    fn tuple(&mut self) -> Result<Vec<usize>, (usize, String)> {
        self.expect(b'(')?;
        let mut sizes = Vec::new();
        while !self.take(b')') {
            let rest = self.rest();
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let size = std::str::from_utf8(&rest[..digits])
                .ok()
                .and_then(|digits| digits.parse().ok());
            let Some(size) = size else {
                return Err(self.error("a size in the shape is not a number"));
            };
            self.at += digits;
            self.take(b'L'); // suffix of long integers in Python 2
            sizes.push(size);
            if !self.take(b',') {
                self.expect(b')')?;
                break;
            }
        }
        Ok(sizes)
    }
}
