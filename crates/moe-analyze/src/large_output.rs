//! Output files of many gigabytes: checks free space first, shows progress, and leaves no file after an interrupt.

use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::bail;
use moe_files::{AtomicFile, parent_of};

use crate::context::Context;
use crate::output::human_bytes;
use crate::progress::Progress;
use crate::{files, interrupt};

/// A file whose writes advance the progress bar, and fail after an interrupt.
pub struct Meter<'a> {
    file: &'a mut BufWriter<AtomicFile>,
    progress: Progress,
    interrupted: &'static AtomicBool,
}

impl Write for Meter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.interrupted.load(Ordering::Relaxed) {
            // Not ErrorKind::Interrupted: writers retry after it.
            return Err(io::Error::other("interrupted; nothing was written"));
        }
        let n = self.file.write(bytes)?;
        self.progress.inc(n as u64);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes a file of `size` bytes with `make`. `path` must have passed [`files::check_output`].
pub fn write(
    ctx: &Context,
    path: &Path,
    force: bool,
    size: u64,
    make: impl FnOnce(&mut Meter<'_>) -> io::Result<()>,
) -> anyhow::Result<()> {
    check_free_space(path, size)?;
    let interrupted = interrupt::flag();
    files::write(path, force, |file| {
        let mut meter = Meter {
            file,
            progress: Progress::bytes(ctx, size),
            interrupted,
        };
        make(&mut meter)?;
        Ok(meter.flush()?)
    })?;
    interrupt::end_program();
    Ok(())
}

/// Rejects a file that does not fit into the free space of its file system. Unknown free space is not an error.
pub fn check_free_space(path: &Path, size: u64) -> anyhow::Result<()> {
    match fs4::available_space(parent_of(path)) {
        Ok(free) if free < size => bail!(
            "{} needs {size} bytes ({}) but only {free} bytes ({}) are free; free some space or use another path",
            path.display(),
            human_bytes(size),
            human_bytes(free)
        ),
        _ => Ok(()),
    }
}
