//! Addresses in device memory, and events: what operations and records keep of the GPU.

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

/// Values of the GPU that the host wants.
pub struct Wanted<'a> {
    /// Where they lie.
    pub from: Ptr,
    /// Where they go.
    pub to: &'a mut [u8],
}

/// An event of the current pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event(pub(super) usize);

#[cfg(test)]
impl Event {
    pub(crate) fn new(index: usize) -> Event {
        Event(index)
    }

    pub(crate) fn index(self) -> usize {
        self.0
    }
}
