//! The key-values of a model.

use std::path::{Path, PathBuf};

use crate::bytes::Bytes;
use crate::cursor::Located;
use crate::error::{Error, Fault};
use crate::per_layer::PerLayer;
use crate::value::{Array, Value};

/// The key-values of a model, in the order of the file. For a model in several files, those of the first file: other shards
/// contain only `split.*` keys.
///
/// The typed methods return `Ok(None)` for a missing key, and [`Error::WrongType`] for a value of another type.
#[derive(Clone, Debug)]
pub struct Metadata {
    path: PathBuf,
    bytes: Bytes,
    entries: Vec<Entry>,
    /// Indices into `entries`, sorted by key.
    by_key: Vec<u32>,
    /// Offset of the byte after the last value.
    end: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Box<str>,
    pub(crate) value: Value,
    /// Offset of the value type in the file. The value follows it.
    pub(crate) type_offset: u32,
}

impl Metadata {
    /// Returns the metadata with these entries, which end at offset `end`. Rejects duplicate keys.
    pub(crate) fn new(
        path: &Path,
        bytes: &Bytes,
        entries: Vec<Entry>,
        end: u64,
    ) -> Located<Metadata> {
        let mut by_key: Vec<u32> = (0..).take(entries.len()).collect();
        let key = |i: u32| &*entries[i as usize].key;
        by_key.sort_by(|&a, &b| key(a).cmp(key(b)).then(a.cmp(&b)));
        if let Some(pair) = by_key.windows(2).find(|pair| key(pair[0]) == key(pair[1])) {
            let key = key(pair[1]).to_owned();
            let at = entries[pair[1] as usize].type_offset;
            return Err((at.into(), Fault::DuplicateKey { key }));
        }
        Ok(Metadata {
            path: path.to_owned(),
            bytes: bytes.clone(),
            entries,
            by_key,
            end,
        })
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let entry = |i: u32| &self.entries[i as usize];
        let found = self
            .by_key
            .binary_search_by(|&i| (*entry(i).key).cmp(key))
            .ok()?;
        Some(&entry(self.by_key[found]).value)
    }

    /// Keys and values in the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|entry| (&*entry.key, &entry.value))
    }

    /// Iterates over the keys and their encoded values, for an exact copy. The bytes are those of the file: the value type
    /// (4 bytes), then the value.
    pub fn iter_raw(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.entries.iter().enumerate().map(|(i, entry)| {
            let start = u64::from(entry.type_offset);
            let end = match self.entries.get(i + 1) {
                // Between two values are the length of the next key (8 bytes) and the key.
                Some(next) => u64::from(next.type_offset) - next.key.len() as u64 - 8,
                None => self.end,
            };
            let raw = self.bytes.range(start, end - start).unwrap_or_default();
            (&*entry.key, raw)
        })
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of `key` as `u32`. The file may use any integer type.
    ///
    /// # Errors
    /// The value is not an integer or does not fit.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.typed(key, "a u32", |value| u32::try_from(value.as_i128()?).ok())
    }

    /// The value of `key` as `u64`. The file may use any integer type.
    ///
    /// # Errors
    /// The value is not an integer or is negative.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "a u64", |value| u64::try_from(value.as_i128()?).ok())
    }

    /// The value of `key` as `f32`.
    ///
    /// # Errors
    /// The value is not a floating-point number.
    #[expect(clippy::cast_possible_truncation, reason = "the nearest f32")]
    pub fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        self.typed(key, "an f32", |value| Some(value.as_f64()? as f32))
    }

    /// The value of `key` as a boolean.
    ///
    /// # Errors
    /// The value is not a boolean.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "a bool", |value| match value {
            Value::Bool(v) => Some(*v),
            _ => None,
        })
    }

    /// The value of `key` as a string.
    ///
    /// # Errors
    /// The value is not a string.
    pub fn str(&self, key: &str) -> Result<Option<&str>, Error> {
        self.typed(key, "a string", |value| match value {
            Value::String(v) => Some(v.as_str()),
            _ => None,
        })
    }

    /// The value of `key` as an array of strings, which are decoded on the first call.
    ///
    /// # Errors
    /// The value is not an array of strings.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>, Error> {
        self.typed(key, "an array of strings", |value| {
            as_array(value)?.strings()
        })
    }

    /// The value of `key` as an array of integers. The file may use any integer type.
    ///
    /// # Errors
    /// The value is not an array of integers, or one of them does not fit an `i64`.
    pub fn i64s(&self, key: &str) -> Result<Option<Vec<i64>>, Error> {
        self.typed(key, "an array of integers", |value| {
            as_array(value)?
                .iter()
                .map(|v| i64::try_from(v.as_i128()?).ok())
                .collect()
        })
    }

    /// The value of `key` as an array of `f32`.
    ///
    /// # Errors
    /// The value is not an array of floating-point numbers.
    #[expect(clippy::cast_possible_truncation, reason = "the nearest f32")]
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, Error> {
        self.typed(key, "an array of f32", |value| {
            as_array(value)?
                .iter()
                .map(|v| Some(v.as_f64()? as f32))
                .collect()
        })
    }

    /// The value of `key`, which is an integer (the same for all layers) or an array of integers (one per layer). The file may
    /// use any integer type.
    ///
    /// # Errors
    /// The value is neither an integer nor an array of integers; a number is negative; the array has more than 65,535 elements.
    pub fn per_layer(&self, key: &str) -> Result<Option<PerLayer>, Error> {
        let read = |value| PerLayer::from_value(value).map(Some);
        self.get(key)
            .map_or(Ok(None), read)
            .map_err(|found| Error::WrongType {
                path: self.path.clone(),
                key: key.to_owned(),
                found,
                wanted: "a non-negative integer or a list with one per layer",
            })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        convert(value).map(Some).ok_or_else(|| Error::WrongType {
            path: self.path.clone(),
            key: key.to_owned(),
            found: value.describe(),
            wanted,
        })
    }
}

fn as_array(value: &Value) -> Option<&Array> {
    match value {
        Value::Array(array) => Some(array),
        _ => None,
    }
}
