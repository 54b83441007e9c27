//! Dictionary keys of names.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use arrow::array::StringArray;

/// Assigns a key to each name, in the order of first use.
#[derive(Default)]
pub(crate) struct NameTable {
    keys: HashMap<Box<[u8]>, i32, BuildHasherDefault<NameHasher>>,
    strings: Vec<String>,
    array: Option<Arc<StringArray>>,
}

impl NameTable {
    /// The key of a name. Bytes that are not UTF-8 are replaced.
    pub(crate) fn key(&mut self, name: &[u8]) -> i32 {
        if let Some(&key) = self.keys.get(name) {
            return key;
        }
        let key = i32::try_from(self.strings.len())
            .expect("a chunk of a trace has fewer than 2^31 names");
        self.strings
            .push(String::from_utf8_lossy(name).into_owned());
        self.keys.insert(name.into(), key);
        self.array = None;
        key
    }

    /// The names, indexed by key.
    pub(crate) fn strings(&mut self) -> &Arc<StringArray> {
        self.array
            .get_or_insert_with(|| Arc::new(StringArray::from_iter_values(&self.strings)))
    }
}

/// A multiplicative hash of eight bytes at a time. It is sufficient for the few hundred names of a model's graph.
#[derive(Default)]
struct NameHasher(u64);

impl NameHasher {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for NameHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.add(u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.add(u64::from_le_bytes(last));
    }

    fn write_usize(&mut self, n: usize) {
        self.add(n as u64);
    }

    fn finish(&self) -> u64 {
        // The low bits select the bucket, and a multiplication mixes these least.
        self.0 ^ self.0 >> 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assigns_keys_in_order_of_first_use() {
        let mut table = NameTable::default();
        let names: [&[u8]; 6] = [b"norm-0", b"norm-1", b"norm-0", b"bad \xff", b"", b"norm-1"];
        assert_eq!(names.map(|name| table.key(name)), [0, 1, 0, 2, 3, 1]);
        let strings: Vec<_> = table
            .strings()
            .iter()
            .flatten()
            .map(str::to_owned)
            .collect();
        assert_eq!(strings, ["norm-0", "norm-1", "bad \u{fffd}", ""]);
    }
}
