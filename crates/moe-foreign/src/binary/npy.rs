//! NumPy's `.npy`: a header in Python's notation, then the elements.

use super::array::{Array, ElementType};
use super::fault::BinaryFault;

/// The first bytes of a file.
pub(crate) const MAGIC: &[u8] = b"\x93NUMPY";
/// NumPy itself refuses longer headers, unless told otherwise.
const MAX_HEADER: usize = 10_000;
/// The elements of a file that NumPy writes begin at a multiple of this.
const ALIGNMENT: usize = 64;

/// Views the array in a `.npy` file of version 1, 2 or 3.
pub(crate) fn read(bytes: &[u8]) -> Result<Array<'_>, BinaryFault> {
    if !bytes.starts_with(MAGIC) {
        return Err(BinaryFault::at(
            0,
            "not a .npy file: it does not begin with \\x93NUMPY",
        ));
    }
    let (length, start) = match bytes.get(6) {
        Some(1) => (le(bytes, 8, 2), 10),
        Some(2 | 3) => (le(bytes, 8, 4), 12),
        Some(version) => {
            return Err(BinaryFault::at(
                6,
                format!("version {version} of .npy is not known; save it with numpy.save"),
            ));
        }
        None => (None, 6),
    };
    let header = length
        .filter(|&length| length <= MAX_HEADER)
        .and_then(|length| bytes.get(start..)?.get(..length));
    let Some(header) = header else {
        return Err(BinaryFault::at(
            8,
            "the header is cut off or longer than 10000 bytes; save the array anew",
        ));
    };
    let header =
        Header::parse(header).map_err(|(at, reason)| BinaryFault::at(start + at, reason))?;
    let data = start + length.unwrap_or(0);
    Array::contiguous(
        &bytes[data..],
        header.ty,
        header.big_endian,
        header.shape,
        header.fortran_order,
    )
    .map_err(|reason| BinaryFault::at(data, format!("{reason}; the file is damaged or cut off")))
}

/// What stands before the elements of an array in C order and little-endian, as NumPy writes it.
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

/// The header of a `.npy` file of 64-bit numbers without sign, little-endian, in C order.
pub fn npy_header_u64(shape: &[usize]) -> Vec<u8> {
    header(ElementType::U64, shape)
}

/// The header of a `.npy` file of doubles, little-endian, in C order.
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
    /// Reads `{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }`, keys in any order.
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
                _ => return Err(literal.fault("a key other than descr, fortran_order and shape")),
            }
            if !literal.take(b',') {
                literal.expect(b'}')?;
                break;
            }
        }
        let (Some((at, descr)), Some(fortran_order), Some(shape)) = (descr, fortran_order, shape)
        else {
            return Err(literal.fault("the header lacks descr, fortran_order or shape"));
        };
        let (big_endian, ty) = element_type(descr).ok_or_else(|| {
            let descr = String::from_utf8_lossy(descr);
            (
                at,
                format!(
                    "elements of type {descr:?} are not read; save integers or floats (astype)"
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

/// `<i4`: order of the bytes, kind, size.
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

/// The little of Python's notation that a header is made of.
struct Literal<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Literal<'a> {
    fn fault(&self, reason: &str) -> (usize, String) {
        (self.at, format!("{reason}; the header is not NumPy's"))
    }

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
        Err(self.fault(&format!("`{}` is missing", byte as char)))
    }

    fn string(&mut self) -> Result<&'a [u8], (usize, String)> {
        let rest = self.rest();
        let Some((&quote @ (b'\'' | b'"'), text)) = rest.split_first() else {
            return Err(self.fault("a string is missing (records of several fields are not read)"));
        };
        let Some(end) = text.iter().position(|&byte| byte == quote) else {
            return Err(self.fault("a string does not end"));
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
        Err(self.fault("neither True nor False"))
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
                return Err(self.fault("a size in the shape is not a number"));
            };
            self.at += digits;
            self.take(b'L'); // Python 2 marked long integers
            sizes.push(size);
            if !self.take(b',') {
                self.expect(b')')?;
                break;
            }
        }
        Ok(sizes)
    }
}
