//! Output files of many gigabytes: free space is checked first, progress is shown, and an interrupt leaves no file.

use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::bail;
use moe_files::{AtomicFile, parent_of};

use crate::context::Context;
use crate::output::human_bytes;
use crate::progress::Progress;
use crate::{files, interrupt};

/// A file of which every write moves the bar, and to which writes fail after an interrupt.
pub struct Meter<'a> {
    file: &'a mut BufWriter<AtomicFile>,
    progress: Progress,
    interrupted: &'static AtomicBool,
}

impl Write for Meter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.interrupted.load(Ordering::Relaxed) {
            // Not ErrorKind::Interrupted, after which writers try again.
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

/// Makes a file of `size` bytes at `path`, which must have passed [`files::check_output`]. `make` writes it whole.
pub fn write(
    ctx: &Context,
    path: &Path,
    force: bool,
    size: u64,
    make: impl FnOnce(&mut Meter<'_>) -> io::Result<()>,
) -> anyhow::Result<()> {
    check_room(path, size)?;
    let interrupted = interrupt::flag();
    files::write_whole(path, force, |file| {
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

/// Refuses a file that does not fit where it is to lie. Where the system does not tell, nothing is refused.
pub fn check_room(path: &Path, size: u64) -> anyhow::Result<()> {
    match fs4::available_space(parent_of(path)) {
        Ok(free) if free < size => bail!(
            "{} needs {size} bytes ({}), {free} ({}) are free there; make room or name another place",
            path.display(),
            human_bytes(size),
            human_bytes(free)
        ),
        _ => Ok(()),
    }
}
