//! Settings of Post-Fetch.

/// Settings of Post-Fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whether transfers are made at all.
    pub enable: bool,
    /// Whether the CPU computes all experts, for comparison.
    pub force_cpu: bool,
    /// Whether the down product waits for transfers that are not complete; otherwise the CPU computes these experts.
    pub block_on_miss: bool,
    /// Limit of transfers per layer; the CPU computes the other experts.
    pub max_transfers: usize,
    /// Size of the scratchpad, which receives the transfers of a layer, in bytes; `None`: as large as the largest layer requires.
    pub scratchpad_bytes: Option<usize>,
    /// Whether transfers have their own stream; otherwise they share the compute stream and delay its kernels.
    pub dedicated_streams: bool,
    /// Number of selected experts per token whose gate and up the CPU computes; the GPU computes the others. `None`: all on the
    /// CPU.
    pub cpu_limit: Option<usize>,
    /// An error to inject, for tests.
    pub fault: Option<InjectedFault>,
}

/// A step at which a test injects an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// Allocating the scratchpad.
    Alloc,
    /// Every transfer.
    Copy,
    /// Starting a transfer, except for the first one of a layer.
    LaterCopy,
    /// Every product with transferred matrices.
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
