//! Device addresses, events and pending D2H copies, as operations and records refer to them.

/// An address in device memory. The code that launches a kernel ensures that the memory is valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ptr(pub u64);

impl Ptr {
    /// No memory: stands for an optional argument that is omitted.
    pub const NULL: Ptr = Ptr(0);

    /// The address plus `bytes`.
    pub fn offset(self, bytes: usize) -> Ptr {
        Ptr(self.0 + bytes as u64)
    }
}

/// A D2H copy that is requested.
pub struct Wanted<'a> {
    /// Source on the GPU.
    pub from: Ptr,
    /// Destination. Its length is the size of the copy.
    pub to: &'a mut [u8],
}

/// A CUDA event of the current pass, as an index into the events of its GPU.
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
