//! A bounded reader over a header: every read is checked against the end of the file.

use crate::error::Fault;

/// Headers of today have 10 to 30 MB. The limit keeps a sparse file of a terabyte from being walked
/// as one endless array of empty strings, and every count below 32 bits.
pub(crate) const MAX_HEADER: u64 = 1 << 30;

/// A fault and the byte at which it was found; the file's name is added by the caller.
pub(crate) type Located<T> = Result<T, (u64, Fault)>;

#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
    /// Whether the file goes on behind `bytes`.
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

    /// The next `n` bytes; `what` names them in the error.
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

    /// A GGUF string: 64-bit length, then that many bytes.
    pub(crate) fn string(&mut self, what: &'static str) -> Located<&'a [u8]> {
        let len = self.u64(what)?;
        self.take(len, what)
    }

    /// A count of things of at least `min_size` bytes each, refused where the file could not hold
    /// them: nothing is ever allocated for a count that this has not passed.
    pub(crate) fn count(&mut self, min_size: u64, what: &'static str) -> Located<u64> {
        let at = self.pos();
        let count = self.u64(what)?;
        self.fits(count, min_size, what)
            .map_err(|fault| (at, fault))?;
        Ok(count)
    }

    /// Whether `count` things of at least `min_size` bytes can follow.
    pub(crate) fn fits(&self, count: u64, min_size: u64, what: &'static str) -> Result<(), Fault> {
        let left = self.left();
        if count > left / min_size {
            return Err(Fault::TooMany { what, count, left });
        }
        Ok(())
    }
}
