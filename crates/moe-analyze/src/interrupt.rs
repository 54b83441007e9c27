//! Interrupts (Ctrl-C, SIGTERM, SIGHUP) as a flag that long work checks.

use std::sync::atomic::AtomicBool;

use anyhow::Context as _;

/// Installs the program's signal handlers, once, at its start.
#[cfg(unix)]
pub fn install() -> anyhow::Result<()> {
    moe_files::signals::install("moe-analyze").context("cannot install signal handlers")
}

/// Catches Ctrl-C, once, at the start of the program.
#[cfg(not(unix))]
pub fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(moe_files::signals::interrupt).context("cannot catch Ctrl-C")
}

/// Interrupts end the program again, from now on.
pub fn end_program() {
    moe_files::signals::end_on_interrupt();
}

/// A flag that the first interrupt sets from now on, instead of ending the program.
pub fn flag() -> &'static AtomicBool {
    moe_files::signals::interrupted()
}
