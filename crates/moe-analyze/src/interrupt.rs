//! Interrupts (Ctrl-C, SIGTERM, SIGHUP) as a flag that long operations check.

use std::sync::atomic::AtomicBool;

use anyhow::Context as _;

/// Installs the signal handlers. Call it once, at the start of the program.
#[cfg(unix)]
pub fn install() -> anyhow::Result<()> {
    moe_files::signals::install("moe-analyze").context("cannot install signal handlers")
}

/// Installs the Ctrl-C handler. Call it once, at the start of the program.
#[cfg(not(unix))]
pub fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(moe_files::signals::interrupt).context("cannot catch Ctrl-C")
}

/// Makes interrupts end the program again.
pub fn end_program() {
    moe_files::signals::end_on_interrupt();
}

/// Returns a flag that the next interrupt sets instead of ending the program.
pub fn flag() -> &'static AtomicBool {
    moe_files::signals::interrupted()
}
