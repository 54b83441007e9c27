//! Ctrl-C, as a flag that long work looks at.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;

/// A flag that Ctrl-C sets from now on, instead of ending the program. Once in a run of the program.
///
/// Only Ctrl-C: a program that `nohup` shields from a hang-up stays shielded.
pub fn flag() -> anyhow::Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = interrupted.clone();
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))
        .context("cannot catch Ctrl-C")?;
    Ok(interrupted)
}
