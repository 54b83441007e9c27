//! Where the selected experts are computed.

/// Where the selected experts are computed if their weights are in CPU memory and there are few tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Policy {
    /// On the CPU.
    #[default]
    Cpu,
    /// On the GPU, after an H2D copy of the selected experts.
    Gpu,
    /// Gate and up on the CPU, down on the GPU: the H2D copy of down overlaps with gate and up.
    PostFetch,
}
