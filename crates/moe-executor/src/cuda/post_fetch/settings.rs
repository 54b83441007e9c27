//! How Post-Fetch works.

/// How Post-Fetch works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whether it works at all.
    pub enable: bool,
    /// Whether the host computes all the same, for comparison.
    pub force_cpu: bool,
    /// Whether a product waits for a transfer that is late; if not, the host does it.
    pub block_on_miss: bool,
    /// Transfers of a layer at most; the host does the experts beyond them.
    pub max_transfers: usize,
    /// Room for the transfers of a layer, bytes; none: what the largest layer's need.
    pub scratchpad_bytes: Option<usize>,
    /// Whether transfers have a stream of their own; if not, they stand in the way of what the GPU computes.
    pub dedicated_streams: bool,
    /// Chosen experts of a token whose gate and up the host computes; the GPU does those beyond. None: the host does all.
    pub cpu_limit: Option<usize>,
    /// What is made to fail, for tests.
    pub fault: Option<InjectedFault>,
}

/// A step that is made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// The scratchpad's allocation.
    Alloc,
    /// Every transfer.
    Copy,
    /// Every transfer behind the first, where it is started.
    LaterCopy,
    /// Every product with what was transferred.
    Kernel,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            enable: true,
            force_cpu: false,
            block_on_miss: true,
            max_transfers: 8,
            scratchpad_bytes: None,
            dedicated_streams: true,
            cpu_limit: None,
            fault: None,
        }
    }
}
