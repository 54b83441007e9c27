//! Output files: whole or absent, and never over something that was there before.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// Refuses an output path that cannot be written, before any work is done for it.
pub fn check_output(path: &Path, force: bool) -> anyhow::Result<()> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => {
            bail!("{} is a directory; name a file inside it", path.display())
        }
        Ok(found) if !found.is_file() => {
            bail!(
                "{} is not a regular file; name another output",
                path.display()
            )
        }
        Ok(_) if !force => {
            bail!(
                "{} exists already; pass --force to replace it, or name another output",
                path.display()
            )
        }
        _ => {}
    }
    if path.file_name().is_none() {
        bail!("{} does not name a file; name one", path.display());
    }
    let parent = parent_of(path);
    if !parent.is_dir() {
        bail!(
            "the directory {} for {} does not exist; make it first",
            parent.display(),
            path.display()
        );
    }
    Ok(())
}

/// Refuses an output whose extension is not that of the one format that can be written.
pub fn require_extension(path: &Path, extension: &str) -> anyhow::Result<()> {
    let found = path.extension();
    if !found.is_some_and(|found| found.eq_ignore_ascii_case(extension)) {
        bail!(
            "{}: only .{extension} files are written there; name a .{extension} file",
            path.display()
        );
    }
    Ok(())
}

/// Makes a file under a temporary name beside `path` and renames it once it is whole.
///
/// `path` must have passed [`check_output`]. On an error the temporary file is removed and `path` is as before.
pub fn replace(
    path: &Path,
    force: bool,
    make: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let temporary = Temporary {
        path: temporary_name(path),
    };
    make(&temporary.path)
        .and_then(|()| check_output(path, force))
        .and_then(|()| Ok(fs::rename(&temporary.path, path)?))
        .with_context(|| format!("writing {}", path.display()))
}

/// As [`replace`], for what is written from front to back.
pub fn write_whole(
    path: &Path,
    force: bool,
    write: impl FnOnce(&mut BufWriter<File>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    replace(path, force, |temporary| {
        let mut out = BufWriter::new(File::create_new(temporary)?);
        write(&mut out)?;
        Ok(out.flush()?)
    })
}

/// A hidden name beside `path` that keeps its extension, by which some writers choose their format.
fn temporary_name(path: &Path) -> PathBuf {
    let mut name = OsString::from(format!(".{}.", std::process::id()));
    name.push(path.file_name().unwrap_or_default());
    parent_of(path).join(name)
}

/// A file that goes when its writer is done with it; after a rename there is nothing left to remove.
struct Temporary {
    path: PathBuf,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The directory that `path` lies in.
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
