//! Helpers that open fixtures and hand-built files.

use moe_gguf::{Error, Fault, Gguf};
use moe_testkit::gguf::Raw;

/// Opens a hand-built file.
pub trait Opened {
    fn open(&self) -> Result<Gguf, Error>;

    /// Returns the fault that opening the file reports. Panics if there is none.
    fn fault(&self) -> Fault;
}

impl Opened for Raw {
    fn open(&self) -> Result<Gguf, Error> {
        open(&self.bytes)
    }

    fn fault(&self) -> Fault {
        let error = self.open().expect_err("opening the file must fail");
        let text = error.to_string();
        assert!(
            text.starts_with("test.gguf: ") && !text.contains('\n'),
            "{text}"
        );
        error
            .fault()
            .cloned()
            .unwrap_or_else(|| panic!("not a fault of a header: {error}"))
    }
}

/// Opens bytes as if they were the file `test.gguf`.
pub fn open(bytes: &[u8]) -> Result<Gguf, Error> {
    Gguf::from_bytes("test.gguf", bytes)
}

pub fn fixture(name: &str) -> Gguf {
    Gguf::open(moe_testkit::fixture(name)).unwrap()
}
