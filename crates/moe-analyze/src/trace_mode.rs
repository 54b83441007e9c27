//! Values of `--trace`: what is recorded.

use moe_engine::Mode;

/// Values of `--trace`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum TraceMode {
    /// None; no run directory is written
    Off,
    /// Expert operations (MUL_MAT_ID and ADD_ID): for generated tokens, 5 to 17 % of all records
    Experts,
    /// All operations
    #[default]
    All,
}

impl TraceMode {
    /// The operations to record; `None` for none.
    pub fn mode(self) -> Option<Mode> {
        match self {
            TraceMode::Off => None,
            TraceMode::Experts => Some(Mode::Experts),
            TraceMode::All => Some(Mode::All),
        }
    }
}
