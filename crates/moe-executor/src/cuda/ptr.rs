//! Addresses in device memory.

/// An address in device memory, or none. Whoever launches a kernel vouches for what lies there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ptr(pub u64);

impl Ptr {
    /// No memory: an optional argument that is left out.
    pub const NULL: Ptr = Ptr(0);

    /// The address `bytes` further on.
    pub fn offset(self, bytes: usize) -> Ptr {
        Ptr(self.0 + bytes as u64)
    }
}
