//! Values of the key-value section.

use std::fmt;
use std::sync::OnceLock;

use crate::bytes::Bytes;
use crate::cursor::{Cursor, Located};
use crate::error::Fault;
use crate::format::write_string;

/// The type of a value. The discriminant is the id in the file. `U8` is `GGUF_TYPE_UINT8`, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
#[repr(u32)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::String,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    /// Returns the type with this id, or `None` for an unknown id.
    pub fn from_id(id: u32) -> Option<ValueType> {
        Self::ALL.get(usize::try_from(id).ok()?).copied()
    }

    /// The id in the file.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The name in lower case, for example `u32`.
    pub const fn name(self) -> &'static str {
        match self {
            ValueType::U8 => "u8",
            ValueType::I8 => "i8",
            ValueType::U16 => "u16",
            ValueType::I16 => "i16",
            ValueType::U32 => "u32",
            ValueType::I32 => "i32",
            ValueType::F32 => "f32",
            ValueType::Bool => "bool",
            ValueType::String => "string",
            ValueType::Array => "array",
            ValueType::U64 => "u64",
            ValueType::I64 => "i64",
            ValueType::F64 => "f64",
        }
    }

    /// Size of a value in the file, in bytes; the minimum size for strings and arrays.
    const fn min_size(self) -> u64 {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::String | ValueType::U64 | ValueType::I64 | ValueType::F64 => 8,
            ValueType::Array => 12,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The value of a key.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// Invalid UTF-8 is replaced by U+FFFD.
    String(String),
    Array(Box<Array>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// The type of the value.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The value of any integer type; `None` for other types.
    pub fn as_i128(&self) -> Option<i128> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => Some(v.into()),
            Value::I64(v) => Some(v.into()),
            _ => None,
        }
    }

    /// The value of any floating-point type; `None` for other types.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// Describes the value for error messages: `of type u32 (7)`, `an array of 48 u32`.
    pub(crate) fn describe(&self) -> String {
        match self {
            Value::Array(array) => format!("an array of {} {}", array.len(), array.element_type()),
            other => format!("of type {} ({other})", other.value_type()),
        }
    }

    /// Appends the value to `out` in the encoding of GGUF, without its type.
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            Value::U8(v) => out.push(*v),
            Value::I8(v) => out.extend(v.to_le_bytes()),
            Value::U16(v) => out.extend(v.to_le_bytes()),
            Value::I16(v) => out.extend(v.to_le_bytes()),
            Value::U32(v) => out.extend(v.to_le_bytes()),
            Value::I32(v) => out.extend(v.to_le_bytes()),
            Value::F32(v) => out.extend(v.to_le_bytes()),
            Value::Bool(v) => out.push((*v).into()),
            Value::String(v) => write_string(v, out),
            Value::Array(v) => {
                out.extend(v.element_type.id().to_le_bytes());
                out.extend(v.len.to_le_bytes());
                out.extend(v.raw());
            }
            Value::U64(v) => out.extend(v.to_le_bytes()),
            Value::I64(v) => out.extend(v.to_le_bytes()),
            Value::F64(v) => out.extend(v.to_le_bytes()),
        }
    }

    /// Reads a value of type `ty`. Positions of the cursor are offsets in `bytes`. `key` is for errors.
    pub(crate) fn read(
        cursor: &mut Cursor<'_>,
        bytes: &Bytes,
        ty: ValueType,
        key: &str,
    ) -> Located<Value> {
        const WHAT: &str = "a metadata value";
        Ok(match ty {
            ValueType::U8 => Value::U8(cursor.u8(WHAT)?),
            ValueType::I8 => Value::I8(cursor.u8(WHAT)? as i8),
            ValueType::U16 => Value::U16(cursor.u16(WHAT)?),
            ValueType::I16 => Value::I16(cursor.u16(WHAT)? as i16),
            ValueType::U32 => Value::U32(cursor.u32(WHAT)?),
            ValueType::I32 => Value::I32(cursor.u32(WHAT)? as i32),
            ValueType::F32 => Value::F32(f32::from_bits(cursor.u32(WHAT)?)),
            ValueType::Bool => Value::Bool(cursor.u8(WHAT)? != 0), // Like ggml, which reads an int8.
            ValueType::String => Value::String(lossy(cursor.string(WHAT)?)),
            ValueType::Array => Value::Array(Box::new(Array::read(cursor, bytes, key)?)),
            ValueType::U64 => Value::U64(cursor.u64(WHAT)?),
            ValueType::I64 => Value::I64(cursor.u64(WHAT)? as i64),
            ValueType::F64 => Value::F64(f64::from_bits(cursor.u64(WHAT)?)),
        })
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::F32(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::String(v) => write!(f, "{v:?}"),
            Value::Array(v) => write!(f, "[{} x {}]", v.len(), v.element_type()),
            Value::U64(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
        }
    }
}

/// Maximum number of strings of an array: twenty times the tokens or merges of the largest current vocabulary. An empty
/// string takes three times as many bytes in memory as in the file.
const MAX_STRINGS: u64 = 1 << 22;

/// An array value. Its elements are decoded on demand, so that a reader of offsets does not pay for a vocabulary.
#[derive(Clone, Debug)]
pub struct Array {
    element_type: ValueType,
    len: u64,
    bytes: Bytes,
    start: u64,
    size: u64,
    strings: OnceLock<Vec<String>>,
}

impl Array {
    /// Returns an array with these elements, or `None` if an element has another type or is an array.
    pub fn new(
        element_type: ValueType,
        elements: impl IntoIterator<Item = Value>,
    ) -> Option<Array> {
        let mut bytes = Vec::new();
        let mut len = 0;
        for element in elements {
            if element.value_type() != element_type {
                return None;
            }
            element.write(&mut bytes);
            len += 1;
        }
        (element_type != ValueType::Array).then(|| Array {
            element_type,
            len,
            start: 0,
            size: bytes.len() as u64,
            bytes: Bytes::Owned(bytes.into()),
            strings: OnceLock::new(),
        })
    }

    fn read(cursor: &mut Cursor<'_>, bytes: &Bytes, key: &str) -> Located<Array> {
        const WHAT: &str = "an array";
        let at = cursor.pos();
        let id = cursor.u32(WHAT)?;
        let element_type = match ValueType::from_id(id) {
            Some(ValueType::Array) => {
                return Err((
                    at,
                    Fault::NestedArray {
                        key: key.to_owned(),
                    },
                ));
            }
            Some(ty) => ty,
            None => {
                return Err((
                    at,
                    Fault::BadValueType {
                        key: key.to_owned(),
                        id,
                    },
                ));
            }
        };
        let len = cursor.count(element_type.min_size(), "array elements")?;
        let start = cursor.pos();
        if element_type == ValueType::String {
            if len > MAX_STRINGS {
                let (key, count, limit) = (key.to_owned(), len, MAX_STRINGS);
                return Err((at, Fault::TooManyStrings { key, count, limit }));
            }
            for _ in 0..len {
                cursor.string("a string of an array")?;
            }
        } else {
            // Cannot overflow: `count` has checked that the product fits the file.
            cursor.take(len * element_type.min_size(), WHAT)?;
        }
        let size = cursor.pos() - start;
        Ok(Array {
            element_type,
            len,
            bytes: bytes.clone(),
            start,
            size,
            strings: OnceLock::new(),
        })
    }

    /// Type of the elements, never [`ValueType::Array`].
    pub fn element_type(&self) -> ValueType {
        self.element_type
    }

    /// Number of elements.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements in the encoding of GGUF, without element type and count.
    pub fn raw(&self) -> &[u8] {
        self.bytes.range(self.start, self.size).unwrap_or_default()
    }

    /// Iterates over the decoded elements.
    pub fn iter(&self) -> impl Iterator<Item = Value> + '_ {
        let mut cursor = Cursor::new(self.raw());
        (0..self.len)
            .map_while(move |_| Value::read(&mut cursor, &self.bytes, self.element_type, "").ok())
    }

    /// The elements of an array of strings, which are decoded on the first call. `None` for other arrays.
    pub fn strings(&self) -> Option<&[String]> {
        if self.element_type != ValueType::String {
            return None;
        }
        let decode = || {
            let mut cursor = Cursor::new(self.raw());
            (0..self.len)
                .map_while(|_| cursor.string("").ok().map(lossy))
                .collect()
        };
        Some(self.strings.get_or_init(decode))
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
