//! Opens fixtures, and files that were built byte by byte.

use moe_gguf::{Error, Fault, Gguf};
use moe_testkit::gguf::Raw;

/// What the reader makes of a file that was built by hand.
pub trait Opened {
    fn open(&self) -> Result<Gguf, Error>;

    /// The rule that opening the file says is broken.
    fn fault(&self) -> Fault;
}

impl Opened for Raw {
    fn open(&self) -> Result<Gguf, Error> {
        open(&self.bytes)
    }

    fn fault(&self) -> Fault {
        let error = self.open().expect_err("the file must be refused");
        let text = error.to_string();
        assert!(
            text.starts_with("test.gguf: ") && !text.contains('\n'),
            "{text}"
        );
        error
            .fault()
            .cloned()
            .unwrap_or_else(|| panic!("no fault of the header: {error}"))
    }
}

/// Opens bytes as if they were the file `test.gguf`.
pub fn open(bytes: &[u8]) -> Result<Gguf, Error> {
    Gguf::from_bytes("test.gguf", bytes)
}

pub fn fixture(name: &str) -> Gguf {
    Gguf::open(moe_testkit::fixture(name)).unwrap()
}
