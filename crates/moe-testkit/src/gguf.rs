//! Builder of valid and invalid GGUF files. It does not use the crates that read and write GGUF files.

/// Ids of value types.
pub const U16: u32 = 2;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;

/// Id of the tensor type F32.
pub const F32: u32 = 0;

/// A file under construction. The methods append their arguments without checks.
#[derive(Clone)]
pub struct Raw {
    pub bytes: Vec<u8>,
}

impl Raw {
    /// Starts a file with the magic number, version 3 and the two counts.
    pub fn new(n_tensors: u64, n_kv: u64) -> Raw {
        Raw {
            bytes: b"GGUF".to_vec(),
        }
        .u32(3)
        .u64(n_tensors)
        .u64(n_kv)
    }

    pub fn u32(mut self, value: u32) -> Raw {
        self.bytes.extend(value.to_le_bytes());
        self
    }

    pub fn u64(mut self, value: u64) -> Raw {
        self.bytes.extend(value.to_le_bytes());
        self
    }

    pub fn raw(mut self, bytes: &[u8]) -> Raw {
        self.bytes.extend(bytes);
        self
    }

    pub fn string(self, text: &str) -> Raw {
        self.u64(text.len() as u64).raw(text.as_bytes())
    }

    /// Appends a key with a 32-bit value.
    pub fn kv_u32(self, key: &str, value: u32) -> Raw {
        self.string(key).u32(U32).u32(value)
    }

    /// Appends a key with a string.
    pub fn kv_string(self, key: &str, value: &str) -> Raw {
        self.string(key).u32(STRING).string(value)
    }

    /// Appends an entry of the tensor table.
    pub fn tensor(self, name: &str, ne: &[u64], ty: u32, offset: u64) -> Raw {
        let raw = self.string(name).u32(ne.len() as u32);
        ne.iter()
            .fold(raw, |raw, &n| raw.u64(n))
            .u32(ty)
            .u64(offset)
    }

    /// Appends padding to `alignment`, and `n` zeros as data.
    pub fn data(mut self, alignment: usize, n: usize) -> Raw {
        let start = self.bytes.len().next_multiple_of(alignment);
        self.bytes.resize(start + n, 0);
        self
    }
}
