//! Writer of GGUF files: a header, then the data of tensors, streamed in the order of the table.
//!
//! Each tensor starts at the padded end of the preceding tensor, as llama.cpp requires.

use std::io::{self, Write};

use moe_gguf::format::{DEFAULT_ALIGNMENT, MAX_DIMS, MAX_I64, MAX_NAME, tensor_size, write_string};
use moe_gguf::{Fault, GgmlType, Gguf, Value};

/// The header of a new file.
#[derive(Clone, Debug)]
pub struct Header {
    version: u32,
    alignment: u64,
    keys: Vec<String>,
    /// Encoded keys, types and values.
    key_values: Vec<u8>,
    tensors: Vec<TensorInfo>,
    data_size: u64,
}

/// A tensor of a new file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Type of its elements.
    pub ty: GgmlType,
    /// Number of elements in each dimension, innermost first; at most four dimensions.
    pub ne: Vec<u64>,
    /// Offset in the data section, in bytes.
    pub offset: u64,
    /// Size in bytes, without padding.
    pub size_bytes: u64,
}

impl Default for Header {
    fn default() -> Self {
        Header::new()
    }
}

impl Header {
    /// Returns a header of version 3 without key-values and tensors.
    pub fn new() -> Header {
        Header {
            version: 3,
            alignment: DEFAULT_ALIGNMENT.into(),
            keys: Vec::new(),
            key_values: Vec::new(),
            tensors: Vec::new(),
            data_size: 0,
        }
    }

    /// Returns a header with the version and the exact key-values of a model, except keys for which `skip` returns true.
    ///
    /// The header has no tensors.
    ///
    /// # Errors
    /// A key-value is invalid, which is impossible for a model that was opened.
    pub fn like(gguf: &Gguf, skip: impl Fn(&str) -> bool) -> Result<Header, Fault> {
        let mut header = Header {
            version: gguf.version(),
            ..Header::new()
        };
        let values = gguf.metadata().iter().zip(gguf.metadata().iter_raw());
        for ((key, value), (_, raw)) in values.filter(|((key, _), _)| !skip(key)) {
            header.check_key(key, value)?;
            write_string(key, &mut header.key_values);
            header.key_values.extend(raw);
        }
        Ok(header)
    }

    /// Adds a key-value. `general.alignment` must be added before the tensors.
    ///
    /// # Errors
    /// The key is empty or exists; the value is an invalid alignment.
    pub fn set(&mut self, key: &str, value: &Value) -> Result<(), Fault> {
        self.check_key(key, value)?;
        write_string(key, &mut self.key_values);
        self.key_values
            .extend(value.value_type().id().to_le_bytes());
        value.write(&mut self.key_values);
        Ok(())
    }

    /// Checks a key-value and registers its key. Sets the alignment if the key is `general.alignment`.
    fn check_key(&mut self, key: &str, value: &Value) -> Result<(), Fault> {
        if key.is_empty() {
            return Err(Fault::EmptyKey);
        }
        if self.keys.iter().any(|k| k == key) {
            return Err(Fault::DuplicateKey {
                key: key.to_owned(),
            });
        }
        if key == "general.alignment" {
            self.alignment = match *value {
                Value::U32(alignment) if alignment.is_power_of_two() && self.tensors.is_empty() => {
                    alignment.into()
                }
                Value::U32(value) => return Err(Fault::BadAlignment { value }),
                ref other => {
                    return Err(Fault::AlignmentType {
                        found: other.value_type(),
                    });
                }
            };
        }
        self.keys.push(key.to_owned());
        Ok(())
    }

    /// Appends a tensor of at most four dimensions.
    ///
    /// # Errors
    /// The tensor violates a rule of ggml's reader.
    pub fn tensor(&mut self, name: &str, ty: GgmlType, ne: &[u64]) -> Result<(), Fault> {
        if name.len() as u64 > MAX_NAME {
            return Err(Fault::TensorNameTooLong {
                len: name.len() as u64,
            });
        }
        let mut all = [1; MAX_DIMS as usize];
        match all.get_mut(..ne.len()) {
            Some(used) => used.copy_from_slice(ne),
            None => {
                let n_dims = u32::try_from(ne.len()).unwrap_or(u32::MAX);
                return Err(Fault::BadDimensions {
                    tensor: name.to_owned(),
                    n_dims,
                });
            }
        }
        let size_bytes = tensor_size(name, ty, all)?;
        let offset = self.data_size;
        self.data_size = size_bytes
            .checked_next_multiple_of(self.alignment)
            .and_then(|padded| padded.checked_add(offset))
            .filter(|&size| size <= MAX_I64)
            .ok_or(Fault::TotalOverflow)?;
        let (name, ne) = (name.to_owned(), ne.to_vec());
        self.tensors.push(TensorInfo {
            name,
            ty,
            ne,
            offset,
            size_bytes,
        });
        Ok(())
    }

    /// The tensors, in the order of the table and the data.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Size of the data section in bytes, including padding.
    pub fn data_size(&self) -> u64 {
        self.data_size
    }

    /// Returns the encoded header with padding. The data section starts after it.
    ///
    /// # Errors
    /// Two tensors have the same name.
    pub fn encode(&self) -> Result<Vec<u8>, Fault> {
        let mut names: Vec<&str> = self.tensors.iter().map(|t| t.name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Fault::DuplicateTensor {
                tensor: pair[0].to_owned(),
            });
        }

        let mut out = Vec::with_capacity(self.key_values.len() + 96 * self.tensors.len() + 64);
        out.extend(b"GGUF");
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        out.extend(&self.key_values);
        for tensor in &self.tensors {
            write_string(&tensor.name, &mut out);
            out.extend((tensor.ne.len() as u32).to_le_bytes());
            for n in &tensor.ne {
                out.extend(n.to_le_bytes());
            }
            out.extend(tensor.ty.id().to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        let padded = (out.len() as u64).next_multiple_of(self.alignment);
        out.resize(padded as usize, 0);
        Ok(out)
    }
}

/// Writes a file: the header on creation, then the data of each tensor in the order of the table.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    tensors: std::vec::IntoIter<TensorInfo>,
    alignment: u64,
    /// Bytes that are missing of the current tensor.
    left: u64,
    /// Bytes of padding after the current tensor.
    padding: u64,
}

impl<W: Write> Writer<W> {
    /// Writes the header to `out`.
    ///
    /// # Errors
    /// The header is invalid ([`io::ErrorKind::InvalidInput`]) or cannot be written.
    pub fn new(mut out: W, header: Header) -> io::Result<Writer<W>> {
        out.write_all(&header.encode().map_err(invalid)?)?;
        let mut writer = Writer {
            out,
            alignment: header.alignment,
            tensors: header.tensors.into_iter(),
            left: 0,
            padding: 0,
        };
        writer.next_tensor()?;
        Ok(writer)
    }

    /// Writes the next bytes of data. `data` may be a part of a tensor, or several tensors; padding is inserted.
    ///
    /// # Errors
    /// The tensors of the header have fewer bytes; the data cannot be written.
    pub fn write(&mut self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            if self.left == 0 {
                return Err(invalid("more data than the tensors of the header have"));
            }
            let n = usize::try_from(self.left).map_or(data.len(), |left| left.min(data.len()));
            let (now, later) = data.split_at(n);
            self.out.write_all(now)?;
            self.left -= n as u64;
            if self.left == 0 {
                self.next_tensor()?;
            }
            data = later;
        }
        Ok(())
    }

    /// Flushes the output after the last tensor and returns it.
    ///
    /// # Errors
    /// Data of a tensor is missing; the file cannot be written.
    pub fn finish(mut self) -> io::Result<W> {
        if self.left > 0 {
            return Err(invalid("less data than the tensors of the header have"));
        }
        self.out.flush()?;
        Ok(self.out)
    }

    /// Pads the current tensor and advances to the next tensor that is not empty.
    fn next_tensor(&mut self) -> io::Result<()> {
        io::copy(
            &mut io::Read::take(io::repeat(0), self.padding),
            &mut self.out,
        )?;
        self.padding = 0;
        if let Some(tensor) = self.tensors.find(|t| t.size_bytes > 0) {
            self.left = tensor.size_bytes;
            self.padding = self.left.next_multiple_of(self.alignment) - self.left;
        }
        Ok(())
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}
