//! A bounds-checked reader of a header.

use crate::error::Fault;

/// Maximum size of a header in bytes. Headers of current models have 10 to 30 MB.
///
/// Without the limit, a sparse file of a terabyte could contain one huge array of empty strings. Offsets fit in 32 bits.
pub(crate) const MAX_HEADER: u64 = 1 << 30;

/// A result whose error is a fault and its byte offset. The caller adds the name of the file.
pub(crate) type Located<T> = Result<T, (u64, Fault)>;

#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
    /// Whether the file continues after `bytes`.
    limited: bool,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        let limit = usize::try_from(MAX_HEADER).unwrap_or(usize::MAX);
        let limited = bytes.len() > limit;
        Cursor {
            bytes: if limited { &bytes[..limit] } else { bytes },
            pos: 0,
            limited,
        }
    }

    pub(crate) fn pos(&self) -> u64 {
        self.pos as u64
    }

    pub(crate) fn left(&self) -> u64 {
        (self.bytes.len() - self.pos) as u64
    }

    /// Returns the next `n` bytes. `what` names them in the error.
    pub(crate) fn take(&mut self, n: u64, what: &'static str) -> Located<&'a [u8]> {
        let rest = &self.bytes[self.pos..];
        let taken = usize::try_from(n).ok().and_then(|n| rest.get(..n));
        let Some(taken) = taken else {
            let fault = if self.limited {
                Fault::HeaderTooLong { limit: MAX_HEADER }
            } else {
                Fault::Truncated {
                    what,
                    needed: n,
                    left: self.left(),
                }
            };
            return Err((self.pos(), fault));
        };
        self.pos += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Located<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Located<u8> {
        self.array(what).map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self, what: &'static str) -> Located<u16> {
        self.array(what).map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Located<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Located<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Reads a GGUF string: a 64-bit length, and the bytes.
    pub(crate) fn string(&mut self, what: &'static str) -> Located<&'a [u8]> {
        let len = self.u64(what)?;
        self.take(len, what)
    }

    /// Reads a 64-bit count of items with at least `min_size` bytes each. Rejects a count that does not fit the rest of the file,
    /// so that no memory is allocated for it.
    pub(crate) fn count(&mut self, min_size: u64, what: &'static str) -> Located<u64> {
        let at = self.pos();
        let count = self.u64(what)?;
        self.fits(count, min_size, what)
            .map_err(|fault| (at, fault))?;
        Ok(count)
    }

    /// Checks that the rest of the file can contain `count` items with at least `min_size` bytes each.
    pub(crate) fn fits(&self, count: u64, min_size: u64, what: &'static str) -> Result<(), Fault> {
        let left = self.left();
        if count > left / min_size {
            return Err(Fault::TooMany { what, count, left });
        }
        Ok(())
    }
}
